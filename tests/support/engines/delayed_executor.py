"""An executor under which anything may come late, and in another order."""

from random import Random


class DelayedExecutor:
    """Does some of its work whenever it is asked to, in any order."""

    def __init__(self, rng: Random) -> None:
        self.rng, self.jobs = rng, []

    def submit(self, function, *arguments) -> None:
        self.jobs.append((function, arguments))

    def run(self, share: float = 1.0) -> None:
        """Each job is done with this probability."""
        self.rng.shuffle(self.jobs)
        now, later = [], []
        for job in self.jobs:
            (now if self.rng.random() < share else later).append(job)
        self.jobs = later
        for function, arguments in now:
            function(*arguments)

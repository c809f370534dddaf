"""The split over HTTP: endpoints of both roles under `/split/`, and the decode side's client for them."""

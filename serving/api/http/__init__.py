"""The HTTP server. `create_app(async_engine, settings)` of `app` creates the application."""

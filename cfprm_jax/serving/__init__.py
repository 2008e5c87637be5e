"""A reward server: request and answer bodies, batching, the scorer's thread, and the ASGI application."""

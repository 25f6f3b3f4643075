"""Moving the pieces of a request from prefill to decode: engines, staging, messages and the life of a request."""

"""Who serves: each server tells it to etcd and on a route of its own, and routers follow it (docs/discovery.md)."""

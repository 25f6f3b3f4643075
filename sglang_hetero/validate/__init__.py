"""`sglang-hetero validate`: what works on this host, stage by stage, from the environment to a served request
(docs/validate.md)."""

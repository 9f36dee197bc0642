"""pylosses inside other libraries. Each module here needs its library, and nothing else imports it."""

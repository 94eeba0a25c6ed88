//! Real guests, real clients.

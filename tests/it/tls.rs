//! TLS on every side: clients, operators, replicas and workers.

mod ca;
mod client;
mod configuration;
mod handshakes;
mod limits;
mod listeners;
mod operators;
mod peers;
mod reload;
mod worker;
mod workers;

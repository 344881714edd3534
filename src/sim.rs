//! Pretend parts, for the demo, the tests and the replay of traces.

pub mod demo;
pub mod engine;
pub mod fault;
mod progress;
pub mod replay;
pub mod replicas;
pub mod report;
pub mod trace;
pub mod worker;
mod world;

//! Pretend parts, for the demo, the tests and the replay of traces.

pub mod demo;
pub mod engine;
pub mod fault;
pub mod report;
pub mod worker;

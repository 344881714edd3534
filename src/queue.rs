//! Requests that wait in the router because every worker that could take them has enough to compute. Pure: time is an
//! argument, and what waits is any value that the caller wakes.
//!
//! [`Queue`] holds the requests of one model and decides who is next: priority classes with a floor each (`floors`),
//! within a class deficit round robin over clients (`class`), within a client the earliest deadline. It refuses a
//! request that cannot meet its target for the time to the first token (`estimate`).

mod class;
mod estimate;
mod floors;
mod forecast;
mod machine;
mod settings;
mod types;

pub use self::machine::{ClassStatus, Left, Queue};
pub use self::settings::{Advanced, ClassSettings, Settings};
pub use self::types::{EntryId, Outcome, Refusal, RefusalReason, Request, Room, SetBy};

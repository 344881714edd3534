//! Requests that wait in the router because every worker that could take them has enough to compute. Pure: time is an
//! argument, and what waits is any value that the caller wakes.
//!
//! [`Queue`] holds the requests of the models that share workers and decides who is next: priority classes with a floor each
//! (`floors`), within a class clients in turn (`class`), within a client the earliest target, then the shortest prompt. Whoever
//! owns the queue says of each whether its worker has room. It refuses a request that cannot meet its target for the time to the
//! first token (`estimate`).
//!
//! Beside it, which line each of them is in ([`InLine`]), and whether one of another replica goes first ([`LetFirst`]).

mod class;
mod estimate;
mod floors;
mod forecast;
mod in_line;
mod let_first;
mod machine;
mod next;
mod settings;
mod types;

pub use self::in_line::{InLine, PlaceInLine};
pub use self::let_first::{LetFirst, Patience, Turn};
pub use self::machine::{
    Below, ClassStatus, Entered, LOOKED_AT_IN_ORDER, Left, PASSED_OVER_FOR, PASSED_OVER_MAX, Queue,
};
pub use self::settings::{ClassSettings, Settings, Waiting};
pub use self::types::{
    EntryId, Look, Outcome, Refusal, RefusalReason, Request, Room, SetBy, Stretch, Timing,
};

//! Background responses: they run without a connected client, each on one owner, readable on every replica.
//!
//! ```text
//! create ─▶ record (queued, owned here) ─▶ run: engine ─▶ events ─▶ store ─▶ readers, on any replica
//! owner: heartbeat, notices (stop one), scan (take over orphans), ends (written again if the store lost them)
//! ```

mod cancel;
mod create;
pub mod log;
mod metrics;
mod owner;
pub mod read_position;
mod reader;
pub mod recent_ends;
mod repeat_ends;
mod run;
mod run_phase;
pub mod run_state;
pub mod run_step;
pub mod run_table;
mod runs;
mod settings;
mod stored_request;
pub mod take_over;
mod unreadable;
mod waiting_orphans;

pub(super) use self::runs::{Background, Counts};
pub use self::settings::Settings;

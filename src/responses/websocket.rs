//! WebSocket mode of the Responses API, without its I/O: what a client's frame asks for, which turn runs when, what a
//! connection remembers, and when it ends. Pure.
//!
//! ```text
//! frame ─▶ client_frame (create | ignored | error) ─▶ session: lanes, queue, memory ─▶ turns to start, frames to send
//!                                                        ▲                               │
//!                                                        └── how a turn ended ◀──────────┘
//! ```
//!
//! A turn itself is a create over HTTP with `stream`: the same code makes its events.

pub mod client_frame;
pub mod error_frame;
pub mod lifetime;
pub mod memory;
pub mod session;
mod settings;
pub mod step;

pub use self::settings::Settings;

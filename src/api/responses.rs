//! The Responses API: its state is the router's, engines see one stateless request each.

mod input;
mod item;
mod members;
mod request;

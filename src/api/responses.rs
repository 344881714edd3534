//! The Responses API: its state is the router's, engines see one stateless request each.

mod engine;
mod events;
mod frames;
mod input;
mod item;
mod members;
mod object;
mod page;
mod path;
mod request;
mod sealing;

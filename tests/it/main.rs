#![allow(clippy::unwrap_used)]
mod config;

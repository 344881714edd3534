#![doc = include_str!("ARCHITECTURE.md")]

pub mod ids;
pub mod observe;
pub mod secret;

pub mod http;

pub mod carrier;
pub mod fleet;
pub mod kv;
pub mod prompt;
pub mod store;

pub mod routing;

pub mod relay;

pub mod admin;
pub mod api;
pub mod bridge;

pub mod config;

pub mod app;

pub mod sim;

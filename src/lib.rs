#![doc = include_str!("ARCHITECTURE.md")]

pub mod ids;
pub mod json_scan;
pub mod observe;
pub mod secret;
pub mod units;
pub mod webhooks;

pub mod http;

pub mod traces;

pub mod fleet;
pub mod jwt;
pub mod kv;
pub mod prompt;
pub mod state_token;
pub mod store;

pub mod limits;
pub mod queue;
pub mod routing;

pub mod peers;

pub mod relay;

pub mod openai;

pub mod admin;
pub mod batches;
pub mod bridge;
pub mod responses;

pub mod api;

pub mod config;

pub mod app;

pub mod sim;

pub mod cli;

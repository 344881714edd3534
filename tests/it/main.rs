//! The router over real sockets, in front of pretend engines.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test that fails should panic where it fails, and its tasks die with its runtime"
)]

mod access_log;
mod adapters;
mod admin_roles;
mod architecture;
mod background;
mod batch_command;
mod batches;
mod cli;
mod client;
mod client_limits;
mod cluster;
mod config;
mod continuation;
mod cutting_proxy;
mod dashboard;
mod docs;
mod doctor;
mod drain;
mod dying_workers;
mod extra_endpoints;
mod failures;
mod fault_isolation;
mod first_token;
mod frozen_workers;
#[cfg(feature = "jwt")]
mod jwt;
#[cfg(feature = "kubernetes")]
mod kubernetes;
mod kubernetes_settings;
mod kv_events;
mod limits;
mod localhost_tls;
mod messages;
mod metrics_reference;
mod model_names;
mod operator_texts;
mod own_ports;
mod pairs;
mod patience;
mod peers;
mod prefill_decode;
mod proxy;
mod queue;
mod redis_server;
mod refused_keys;
mod reload;
mod replica_simulation;
mod responses;
mod responses_checks;
mod responses_compact;
mod responses_limits;
mod responses_over_chat;
mod rolling_restart;
mod routed_prompts;
mod routing;
mod sglang;
mod sglang_engine;
mod simulation;
mod store_contract;
mod stub;
mod tenants;
mod tls;
mod tokens;
mod tokens_in_out;
mod top;
#[cfg(feature = "otlp")]
mod traces;
mod traces_settings;
mod usage;
mod vocabulary;
mod warm_start;
mod webhooks;
mod websocket;
mod wire_code;

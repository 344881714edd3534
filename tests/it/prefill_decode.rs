//! Requests over pairs of workers: one computes the prompt, another answers.

pub(crate) mod failures;
mod messages;
mod paths;
mod sglang;
mod stored;

//! Requests over pairs of workers: one computes the prompt, another answers.

mod failures;
mod paths;
mod stored;

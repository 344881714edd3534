//! Simulated engines, and what is built on them: the demo, the replay of request traces, and the tests.
//! Nothing outside this module but `main` imports it.

pub mod demo;
pub mod engine;
pub mod fault;
mod progress;
pub mod replay;
pub mod report;
pub mod step_time;
pub mod trace;
pub mod worker;
#[doc(hidden)]
pub mod world;

/// The values that a group of command-line arguments has when none is given.
fn default_arguments<T: clap::Args>() -> T {
    let command = T::augment_args(clap::Command::new("sim"));
    T::from_arg_matches(&command.get_matches_from(["sim"])).expect("every argument has a default")
}

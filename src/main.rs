//! The binary; the command line is the library's [`warmroute::cli`].

use std::process::ExitCode;

fn main() -> ExitCode {
    warmroute::cli::run()
}

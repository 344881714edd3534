//! `warmroute kv tap`: one engine's cache events on standard output, until it cannot be written to.

use std::io::{self, Write};
use std::time::SystemTime;

use super::{Metrics, Settings, Target, Zmq};
use crate::kv::source::{Said, Source};
use crate::kv::tap::{Style, Tap};
use crate::observe::metrics::Registry;

/// Prints what `target` says. A reader that has gone (`| head`) is no error.
pub async fn run(target: Target, json: bool) -> io::Result<()> {
    let metrics = Metrics::new(&Registry::default());
    let mut source = Zmq::new(target, Settings::default(), metrics);
    let mut tap = Tap::new(if json { Style::Json } else { Style::Text });
    loop {
        let said = source.next().await;
        if matches!(said, Said::Connected { .. }) && source.can_replay() {
            source.replay(0);
        }
        match print(&tap.lines(&said, clock())) {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Ok(()),
            printed => printed?,
        }
    }
}

fn print(lines: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(lines.as_bytes())?;
    out.flush()
}

fn clock() -> f64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(0.0, |since| since.as_secs_f64())
}

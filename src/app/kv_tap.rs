//! `warmroute kv tap`: prints one engine's KV events on standard output until that is closed.

mod lines;

use std::io::{self, Write};

use self::lines::{Style, TapFormatter};
use crate::kv::source::{Source, SourceEvent};
use crate::kv::zmq::{Metrics, Settings, Target, Zmq};
use crate::observe;
use crate::observe::metrics::Registry;

/// Prints the events of `target`. A closed pipe (`| head`) is not an error.
pub async fn run(target: Target, json: bool) -> io::Result<()> {
    let metrics = Metrics::new(&Registry::default());
    let mut source = Zmq::new(target, Settings::default(), metrics);
    let mut formatter = TapFormatter::new(if json { Style::Json } else { Style::Text });
    loop {
        let event = source.next().await;
        if matches!(event, SourceEvent::Connected { .. }) && source.can_replay() {
            source.replay(0);
        }
        match print(&formatter.lines(&event, observe::since_epoch().as_secs_f64())) {
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

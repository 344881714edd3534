//! `warmroute kv tap`: one engine's cache events on standard output, until it cannot be written to.

use std::io;
use std::io::Write;
use std::time::SystemTime;

use super::Metrics;
use super::Settings;
use super::Target;
use super::Zmq;
use crate::kv::source::Said;
use crate::kv::source::Source;
use crate::kv::tap::Style;
use crate::kv::tap::Tap;
use crate::observe::metrics::Registry;

/// Prints what `target` says. A reader that has gone (`| head`) is no error.
pub async fn run(target: Target, json: bool) -> io::Result<()> {
    let endpoint = target.endpoint.to_string();
    let metrics = Metrics::new(&Registry::default());
    let mut source = Zmq::new(target, Settings::default(), metrics);
    let mut trouble = source.trouble();
    let mut tap = Tap::new(if json { Style::Json } else { Style::Text });
    loop {
        let lines = tokio::select! {
            biased;
            said = source.next() => {
                let lines = tap.lines(&said, clock());
                match said {
                    Said::Connected { .. } if source.can_replay() => source.replay(0),
                    // It has just been told.
                    Said::Lost { .. } => trouble.mark_unchanged(),
                    _ => {}
                }
                lines
            }
            Ok(()) = trouble.changed() => {
                let Some(why) = trouble.borrow_and_update().clone() else {
                    continue;
                };
                let mut line = String::new();
                tap.note(&mut line, clock(), "waiting", &format!("{endpoint}: {why}"));
                line
            }
        };
        match print(&lines) {
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

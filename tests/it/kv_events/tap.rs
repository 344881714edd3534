//! `warmroute kv tap`: one engine's events, to be read.

use std::io::BufRead;
use std::process::Command;

use serde_json::Value;
use tokio::sync::mpsc;
use warmroute::sim::worker::Settings;

use super::followed::Prompt;
use crate::cluster::{Engine, Killed, telling};
use crate::patience::too_long;

const PROGRAM: &str = env!("CARGO_BIN_EXE_warmroute");

/// A tap, and the lines that it prints.
struct Tap {
    lines: mpsc::UnboundedReceiver<String>,
    _child: Killed,
}

impl Tap {
    fn of(engine: &Engine, more: &[&str]) -> Self {
        let first = &engine.events[0];
        let mut command = Command::new(PROGRAM);
        command
            .args(["kv", "tap"])
            .args(["--zmq", &format!("tcp://{}", first.events)])
            .args(["--replay", &format!("tcp://{}", first.replay.unwrap())])
            .args(more);
        let (child, printed) = Killed::start(&mut command);
        let (sender, lines) = mpsc::unbounded_channel();
        // Ends with the child.
        std::thread::spawn(move || {
            let mut printed = printed.lines();
            while let Some(Ok(line)) = printed.next() {
                let _ = sender.send(line);
            }
        });
        Self {
            lines,
            _child: child,
        }
    }

    /// Reads up to a line that has all of these.
    async fn until(&mut self, wanted: &[&str]) -> Vec<String> {
        let mut read = Vec::new();
        loop {
            let line = tokio::time::timeout(too_long(), self.lines.recv()).await;
            let Ok(Some(line)) = line else {
                panic!("no line with {wanted:?}: {read:#?}");
            };
            let is_it = wanted.iter().all(|wanted| line.contains(wanted));
            read.push(line);
            if is_it {
                return read;
            }
        }
    }
}

fn adapters() -> Settings {
    Settings {
        models: vec!["sim".to_owned(), "sql".to_owned()],
        ..telling()
    }
}

#[tokio::test]
async fn tap_prints_replayed_and_live_events() {
    let engine = Engine::child("w0", &adapters());
    Prompt::new(1, 40).to(&engine).await;
    let mut tap = Tap::of(&engine, &[]);
    let read = tap.until(&["-- replay: complete, 1 batch"]).await;
    assert!(read[0].ends_with("-- connected: subscribed"), "{read:#?}");
    let kept = [
        "  replay  rank 0  #0 ",
        "stored      2 blocks 32 tokens ",
        " from the start",
    ];
    assert!(kept.iter().all(|kept| read[1].contains(kept)), "{read:#?}");
    assert_eq!(read.len(), 3, "{read:#?}");

    let adapter = Prompt {
        model: "sql",
        ..Prompt::new(1, 20)
    };
    adapter.to(&engine).await;
    tap.until(&["  live    rank 0  #1 ", "1 block 16 tokens", "lora sql"])
        .await;
    Prompt::new(1, 56).to(&engine).await;
    tap.until(&["  live    rank 0  #2 ", "stored", " after "])
        .await;
    engine.reset().await;
    Prompt::new(2, 20).to(&engine).await;
    tap.until(&["  live    rank 0  #3 ", "cleared  all blocks"])
        .await;
    drop(engine);
    tap.until(&["-- disconnected: ", "Reconnecting"]).await;
    tap.until(&["-- waiting: cannot connect"]).await;
}

#[tokio::test]
async fn tap_prints_json_with_the_flag() {
    let engine = Engine::child("w0", &telling());
    Prompt::new(1, 40).to(&engine).await;
    let mut tap = Tap::of(&engine, &["--json"]);
    let mut read = tap.until(&["\"kind\":\"replay\""]).await;
    Prompt::new(1, 56).to(&engine).await;
    read.extend(tap.until(&["\"live\""]).await);
    let read: Vec<Value> = read
        .iter()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let kinds: Vec<&str> = read
        .iter()
        .map(|line| line["kind"].as_str().unwrap())
        .collect();
    assert_eq!(kinds, ["connected", "stored", "replay", "stored"]);
    let hashes: Vec<String> = engine
        .cache_contents(0)
        .await
        .blocks
        .iter()
        .map(|held| format!("{:016x}", held.hash.0))
        .collect();
    let listed = [&read[1], &read[3]].into_iter();
    let mut listed: Vec<&str> = listed
        .flat_map(|line| line["block_hashes"].as_array().unwrap())
        .map(|name| name.as_str().unwrap())
        .collect();
    assert_eq!(read[3]["parent"], listed[1]);
    assert_eq!(
        (&read[1]["sequence"], &read[3]["sequence"]),
        (&0.into(), &1.into())
    );
    listed.sort_unstable();
    assert_eq!(listed, hashes);
}

#[test]
fn tap_names_the_wrong_argument() {
    for (arguments, expected) in [
        (&[][..], "--zmq"),
        (&["--zmq", "127.0.0.1:5557"], "tcp://HOST:PORT"),
        (&["--zmq", "tcp://127.0.0.1:0"], "tcp://HOST:PORT"),
        (
            &["--zmq", "tcp://h:1", "--replay", "h:2"],
            "tcp://HOST:PORT",
        ),
        (&["--zmq", "tcp://h:1", "--jason"], "--json"),
    ] {
        let mut command = Command::new(PROGRAM);
        let output = command
            .args(["kv", "tap"])
            .args(arguments)
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(64), "{arguments:?}");
        assert!(output.stdout.is_empty(), "{arguments:?}");
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(error.contains(expected), "{arguments:?}: {error}");
    }
}

//! Pairs of prefill and decode workers: what `check --live --transfer` finds of them, and what the router knows.

use std::net::SocketAddr;
use std::process::{Command, Output};

use serde_json::Value;
use tokio::task::JoinHandle;
use warmroute::config::Config;
use warmroute::sim::fault::Faults;
use warmroute::sim::worker::{self, Connector, Role, Settings, TransferStats};

use crate::client;
use crate::cluster::{Removed, Router, eventually, fast, with_role};

/// A pretend engine that hands over or takes.
struct Side {
    name: &'static str,
    /// As the configuration says, which may not be what the engine is.
    role: &'static str,
    address: SocketAddr,
    bootstrap: Option<SocketAddr>,
    handle: worker::Handle,
    task: JoinHandle<()>,
}

impl Drop for Side {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Side {
    async fn new(name: &'static str, role: &'static str, settings: Settings) -> Self {
        let worker = worker::bind(settings).await.unwrap();
        let (address, handle) = (worker.addr(), worker.handle());
        Self {
            name,
            role,
            address,
            bootstrap: handle.bootstrap(),
            handle,
            task: tokio::spawn(worker.run(std::future::pending())),
        }
    }

    fn kv_transfers(&self) -> TransferStats {
        self.handle.kv_transfers()
    }
}

fn engine(role: Role, connector: Connector) -> Settings {
    with_role(fast(), connector, role)
}

async fn prefill(name: &'static str, connector: Connector) -> Side {
    Side::new(name, "prefill", engine(Role::Prefill, connector)).await
}

async fn decode(name: &'static str, connector: Connector) -> Side {
    Side::new(name, "decode", engine(Role::Decode, connector)).await
}

fn configured(connector: &str, sides: &[&Side]) -> String {
    let mut text = format!(
        "prefill_decode: {{connector: {connector}, advanced: {{transfer_timeout: 3s}}}}\n\
         fleet: {{health: {{interval: 20ms}}}}\nworkers:\n"
    );
    for side in sides {
        let Side {
            name,
            role,
            address,
            ..
        } = side;
        text += &format!("    - {{url: \"http://{address}\", name: {name}, role: {role}");
        if let Some(bootstrap) = side.bootstrap {
            text += &format!(", bootstrap: \"http://{bootstrap}\"");
        }
        text += "}\n";
    }
    text
}

/// Runs the check. What it printed, and its exit code.
pub(crate) async fn check(text: &str, arguments: &[&str]) -> (String, i32) {
    let file = Removed::new(text);
    let mut command = Command::new(env!("CARGO_BIN_EXE_warmroute"));
    command
        .args(["check", "--config", file.0.to_str().unwrap()])
        .args(arguments);
    // The engines that it asks run here.
    let output = tokio::task::spawn_blocking(move || command.output());
    let output: Output = output.await.unwrap().unwrap();
    let printed = String::from_utf8(output.stdout).unwrap();
    let errors = String::from_utf8(output.stderr).unwrap();
    (printed + &errors, output.status.code().unwrap())
}

fn line<'a>(printed: &'a str, start: &str) -> &'a str {
    let mut lines = printed.lines().map(str::trim);
    let found = lines.find(|line| line.starts_with(start));
    found.unwrap_or_else(|| panic!("{start}: {printed}"))
}

#[tokio::test(flavor = "multi_thread")]
async fn check_live_asks_every_worker_and_fails_for_one_that_does_not_answer() {
    let one = Side::new("one", "both", fast()).await;
    let two = Side::new("two", "both", fast()).await;
    let listed = |side: &Side| {
        format!(
            "    - {{url: \"http://{}\", name: {}}}\n",
            side.address, side.name
        )
    };
    let text = format!("workers:\n{}{}", listed(&one), listed(&two));
    let (printed, code) = check(&text, &["--live"]).await;
    assert_eq!(code, 0, "{printed}");
    assert!(line(&printed, "worker").contains("block"), "{printed}");
    assert!(line(&printed, "one").ends_with("up"), "{printed}");
    assert!(line(&printed, "two").contains(" sim "), "{printed}");
    assert!(!printed.contains("pairs"), "{printed}");

    drop(two);
    let (printed, code) = check(&text, &["--live"]).await;
    assert_eq!(code, 1, "{printed}");
    assert!(line(&printed, "two").contains("down: "), "{printed}");
    assert!(line(&printed, "one").ends_with("up"), "{printed}");

    // Without a connector there is no KV transfer.
    let (printed, code) = check(&text, &["--live", "--transfer"]).await;
    assert_eq!(code, 1);
    assert!(
        printed.contains("prefill_decode.connector is not set"),
        "{printed}"
    );
    assert_eq!(check(&text, &["--transfer"]).await.1, 64);
}

#[tokio::test(flavor = "multi_thread")]
async fn check_transfer_verifies_every_pair_of_either_connector() {
    for (name, connector) in [("nixl", Connector::Nixl), ("mooncake", Connector::Mooncake)] {
        let sides = [
            prefill("p0", connector).await,
            prefill("p1", connector).await,
            decode("d0", connector).await,
        ];
        let text = configured(name, &sides.each_ref());
        let (printed, code) = check(&text, &["--live"]).await;
        assert_eq!(code, 0, "{printed}");
        for part in ["--transfer", "have the KV connector"] {
            let unverified = line(&printed, "2 unverified");
            assert!(unverified.contains(part), "{printed}");
        }
        assert_eq!(sides[0].kv_transfers().prefill_legs, 0);

        let (printed, code) = check(&text, &["--live", "--transfer"]).await;
        assert_eq!(code, 0, "{printed}");
        for pair in ["p0 -> d0 (sim): ok", "p1 -> d0 (sim): ok"] {
            assert!(line(&printed, pair).contains("received"), "{printed}");
        }
        let [p0, p1, d0] = sides.each_ref().map(Side::kv_transfers);
        assert_eq!((p0.fetched, p1.fetched, d0.received), (1, 1, 2));
        for counts in [p0, p1, d0] {
            assert_eq!(
                (counts.wrong_uses, counts.wrong_role, counts.pinned),
                (0, 0, 0)
            );
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn check_transfer_says_what_is_wrong_with_a_pair() {
    // Its blocks are of another size: it is not tried.
    let wide = Settings {
        block_tokens: 32.try_into().unwrap(),
        ..engine(Role::Decode, Connector::Nixl)
    };
    let (p0, d0) = (
        prefill("p0", Connector::Nixl).await,
        decode("d0", Connector::Nixl).await,
    );
    let wide = Side::new("wide", "decode", wide).await;
    // It has no connector, so it computes all itself.
    let plain = Side::new("plain", "decode", fast()).await;
    let text = configured("nixl", &[&p0, &d0, &wide, &plain]);
    let (printed, code) = check(&text, &["--live", "--transfer"]).await;
    assert_eq!(code, 1, "{printed}");
    let incompatible = line(
        &printed,
        "incompatible, block sizes differ: 16 and 32 tokens",
    );
    assert!(incompatible.ends_with("p0 -> wide"), "{printed}");
    assert!(
        line(&printed, "wide has").contains("no compatible partner"),
        "{printed}"
    );
    assert!(line(&printed, "p0 -> d0").contains("ok"), "{printed}");
    assert!(
        line(&printed, "p0 -> plain").contains("FAILED: "),
        "{printed}"
    );
    assert_eq!(wide.kv_transfers().decode_legs, 0);

    // A prefill worker that hands nothing over, and one that fails.
    let plain = Side::new("plain", "prefill", fast()).await;
    let text = configured("nixl", &[&plain, &d0]);
    let (printed, code) = check(&text, &["--live", "--transfer"]).await;
    assert_eq!(code, 1, "{printed}");
    assert!(
        line(&printed, "plain -> d0").contains("did not say where its KV blocks are"),
        "{printed}"
    );
    p0.handle.set_faults(Faults {
        refuse: Some(503),
        ..Faults::default()
    });
    let text = configured("nixl", &[&p0, &d0]);
    let (printed, code) = check(&text, &["--live", "--transfer"]).await;
    assert_eq!(code, 1, "{printed}");
    assert!(
        line(&printed, "p0 -> d0").contains("FAILED: prefill: answered 503"),
        "{printed}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prefill_worker_whose_bootstrap_server_is_silent_is_no_pair() {
    let (p0, d0) = (
        prefill("p0", Connector::Mooncake).await,
        decode("d0", Connector::Mooncake).await,
    );
    let closed = SocketAddr::from(([127, 0, 0, 1], 9));
    let mut hidden = prefill("p0", Connector::Mooncake).await;
    hidden.bootstrap = Some(closed);
    let (printed, code) = check(
        &configured("mooncake", &[&hidden, &d0]),
        &["--live", "--transfer"],
    )
    .await;
    assert_eq!(code, 1, "{printed}");
    assert!(
        printed.contains("bootstrap server does not answer: p0 -> d0"),
        "{printed}"
    );
    assert_eq!(hidden.kv_transfers().prefill_legs, 0);

    // The router learns it, shows it, and forgets it with the process.
    let config = Config::parse("c", &configured("mooncake", &[&p0, &d0])).unwrap();
    let router = Router::here(&config).await;
    let fleet = async || -> Value {
        let page = client::get(router.admin, "/fleet").await;
        serde_json::from_slice(&page.body).unwrap()
    };
    eventually("the pair is known", async || {
        fleet().await["pairs"]["unverified"] == 1
    })
    .await;
    let pairs = &fleet().await["pairs"];
    assert_eq!(
        (&pairs["connector"], &pairs["count"]),
        (&"mooncake".into(), &1.into())
    );
    let bootstrap = async || fleet().await["workers"][0]["kv_transfers"]["bootstrap"].clone();
    let expected = format!("http://{}", p0.bootstrap.unwrap());
    assert_eq!(bootstrap().await, Value::from(expected));
    drop(p0);
    eventually("it is forgotten", async || bootstrap().await.is_null()).await;
    eventually("there is no pair", async || {
        fleet().await["pairs"]["count"] == 0
    })
    .await;
    assert_eq!(
        fleet().await["pairs"]["unpaired"],
        serde_json::json!(["d0"])
    );
}

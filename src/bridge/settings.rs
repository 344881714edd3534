//! The arguments of a bridge.

use std::net::SocketAddr;

use crate::http::listen_address::listen_address;
use crate::http::tls::ServerSettings;
use crate::kv::zmq::{Endpoint, Target};
use crate::units::parse_nonzero_milliseconds;

/// Serve one engine's KV events over gRPC, to any number of routers.
///
/// Subscribes to the engine's events over ZeroMQ (vLLM: --kv-events-config), and serves them through the gRPC
/// method SubscribeKvEvents of vLLM, SGLang, TokenSpeed and TensorRT-LLM. A subscriber can resume after the
/// last batch that it has, or begin with a snapshot of all cached blocks. gRPC's health service, and /healthz
/// and /metrics over HTTP on the same port, show whether the bridge receives the engine's events.
#[derive(clap::Args, Clone, Debug)]
pub struct Settings {
    /// Where the engine publishes its events.
    #[arg(long, value_name = "tcp://HOST:PORT", value_parser = endpoint)]
    pub zmq: Endpoint,

    /// Where the engine answers replay requests. Without it, missed batches are lost, and after each lost
    /// connection all subscribers must clear what they know of the cache.
    #[arg(long, value_name = "tcp://HOST:PORT", value_parser = endpoint)]
    pub replay: Option<Endpoint>,

    /// The ZeroMQ topic that the engine publishes under, or a prefix of the topic. Default: all topics.
    #[arg(long, value_name = "TOPIC", default_value = "")]
    pub topic: String,

    /// Address to serve on; port 0 takes a free one.
    #[arg(long, value_name = "HOST:PORT", value_parser = listen_address)]
    pub listen: SocketAddr,

    /// Path of the certificate to serve with, in PEM: routers connect over TLS. It is read again when it changes.
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    pub tls_certificate: Option<String>,

    /// Path of the certificate's private key, in PEM.
    #[arg(long, value_name = "FILE", requires = "tls_certificate")]
    pub tls_key: Option<String>,

    /// Path of the CA certificates by which routers' certificates are verified, in PEM. Without it routers are
    /// asked for none.
    #[arg(long, value_name = "FILE", requires = "tls_certificate")]
    pub tls_client_ca: Option<String>,

    /// Number of data-parallel ranks of the engine. Rank r uses the ports of --zmq and --replay plus r.
    #[arg(long, value_name = "RANKS", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub ranks: u16,

    // vLLM keeps as many by default (buffer_steps); a busy engine publishes them in minutes.
    /// Batches kept for each rank, for subscribers that resume.
    #[arg(long, value_name = "BATCHES", default_value_t = 10_000)]
    pub history_batches_max: usize,

    // A batch has 1 to 100 kB; at 25 kB on average, 10,000 fit.
    /// Memory for each rank's kept batches; the oldest are dropped first.
    #[arg(long, value_name = "BYTES", default_value_t = 256 << 20)]
    pub history_bytes_max: usize,

    // A block of 16 tokens takes about 225 bytes, so 1 GiB is enough for 75 million tokens. While a snapshot is
    // made, it takes another half of this.
    /// Memory for each rank's cached blocks. Blocks that do not fit are missing in snapshots, which then
    /// say that they are incomplete.
    #[arg(long, value_name = "BYTES", default_value_t = 1 << 30)]
    pub state_bytes_max: usize,

    // A router opens one stream for each rank; 256 are enough for 16 routers and 16 ranks.
    /// Subscriptions at a time; more are refused.
    #[arg(long, value_name = "SUBSCRIBERS", default_value_t = 256)]
    pub subscribers_max: usize,

    /// A subscriber that reads nothing for this long although data is waiting is disconnected.
    #[arg(long = "send-timeout", value_name = "DURATION", default_value = "30s", value_parser = parse_nonzero_milliseconds)]
    pub send_timeout_ms: u64,

    /// After this long without events, ask the engine to replay its last batch, which a restarted one cannot
    /// do. Needs --replay.
    #[arg(long = "silence", value_name = "DURATION", default_value = "10s", value_parser = parse_nonzero_milliseconds)]
    pub silence_ms: u64,
}

impl Settings {
    /// TLS, if there is a certificate.
    pub fn tls(&self) -> Option<ServerSettings> {
        let certificate = self.tls_certificate.clone()?;
        Some(ServerSettings {
            certificate,
            key: self.tls_key.clone().unwrap_or_default(),
            client_ca: self.tls_client_ca.clone().unwrap_or_default(),
            ..ServerSettings::default()
        })
    }

    /// Where each rank publishes, or why the arguments do not fit together.
    pub fn targets(&self) -> Result<Vec<Target>, String> {
        let last = self.ranks.saturating_sub(1);
        for (name, endpoint) in [
            ("--zmq", Some(&self.zmq)),
            ("--replay", self.replay.as_ref()),
        ] {
            if endpoint.is_some_and(|endpoint| endpoint.port.checked_add(last).is_none()) {
                return Err(format!(
                    "{name}: {} ranks need consecutive ports, which would exceed 65535",
                    self.ranks
                ));
            }
        }
        if let Some(replay) = &self.replay
            && replay.host == self.zmq.host
            && replay.port.abs_diff(self.zmq.port) < self.ranks
        {
            return Err(format!(
                "--zmq and --replay: their port ranges overlap; each needs {} consecutive ports, one for each rank",
                self.ranks
            ));
        }
        let of_rank = |endpoint: &Endpoint, rank| Endpoint {
            port: endpoint.port + rank,
            ..endpoint.clone()
        };
        let target = |rank| Target {
            endpoint: of_rank(&self.zmq, rank),
            topic: self.topic.clone(),
            replay: self.replay.as_ref().map(|replay| of_rank(replay, rank)),
        };
        Ok((0..self.ranks).map(target).collect())
    }
}

fn endpoint(text: &str) -> Result<Endpoint, String> {
    let endpoint: Endpoint = text.parse()?;
    if matches!(endpoint.host.as_str(), "*" | "0.0.0.0" | "::") {
        return Err("this is an address to listen on; name the host to connect to".to_owned());
    }
    Ok(endpoint)
}

#[cfg(test)]
mod tests {
    use clap::{Args, FromArgMatches};

    use super::*;

    fn parse(arguments: &str) -> Result<Vec<Target>, String> {
        let command = Settings::augment_args(clap::Command::new("bridge"));
        let words = std::iter::once("bridge").chain(arguments.split_whitespace());
        let matches = command
            .try_get_matches_from(words)
            .map_err(|error| error.to_string())?;
        let settings = Settings::from_arg_matches(&matches).map_err(|error| error.to_string())?;
        settings.targets()
    }

    #[test]
    fn ranks_have_ports_of_their_own() {
        let both = "--zmq tcp://engine:5557 --replay tcp://engine:6557 --ranks 2 --topic kv";
        let targets = parse(&format!("{both} --listen 127.0.0.1:0")).unwrap();
        let found: Vec<_> = targets
            .iter()
            .map(|target| {
                let replay = target.replay.as_ref().map(ToString::to_string);
                (
                    target.endpoint.to_string(),
                    replay.unwrap(),
                    &target.topic[..],
                )
            })
            .collect();
        let rank = |zmq: &str, replay: &str| (zmq.to_owned(), replay.to_owned(), "kv");
        assert_eq!(
            found,
            [
                rank("tcp://engine:5557", "tcp://engine:6557"),
                rank("tcp://engine:5558", "tcp://engine:6558")
            ]
        );
        let ipv6 = parse("--zmq tcp://[::1]:65535 --listen [::]:80").unwrap();
        assert_eq!(ipv6[0].endpoint.to_string(), "tcp://[::1]:65535");
    }

    #[test]
    fn bad_arguments_are_refused() {
        for (arguments, expected) in [
            ("--listen 127.0.0.1:0", "--zmq"),
            ("--zmq tcp://h:1", "--listen"),
            ("--zmq h:1 --listen 127.0.0.1:0", "tcp://HOST:PORT"),
            ("--zmq tcp://*:1 --listen 127.0.0.1:0", "name the host"),
            ("--zmq tcp://h:0 --listen 127.0.0.1:0", "tcp://HOST:PORT"),
            (
                "--zmq tcp://h:65535 --listen 127.0.0.1:0 --ranks 2",
                "2 ranks need consecutive ports",
            ),
            (
                "--zmq tcp://h:1 --listen 127.0.0.1:0 --ranks 0",
                "0 is not in 1..=1024",
            ),
            (
                "--zmq tcp://h:1 --listen 127.0.0.1:0 --silence 0s",
                "expected at least `1ms`",
            ),
            (
                "--zmq tcp://h:1 --listen 127.0.0.1:0 --send-timeout 366d",
                "expected at most `365d`",
            ),
            (
                "--zmq tcp://h:1 --replay tcp://h:2 --listen 127.0.0.1:0 --ranks 2",
                "overlap",
            ),
        ] {
            let error = parse(arguments).unwrap_err();
            assert!(error.contains(expected), "{arguments}: {error}");
        }
    }
}

//! The arguments of a pretend engine.

use std::net::{Ipv4Addr, SocketAddr};
use std::num::{NonZeroU16, NonZeroU32};
use std::path::PathBuf;
use std::time::Duration;

use super::{handoff, publisher};
use crate::sim::engine;
use crate::sim::fault::Faults;

#[derive(clap::Args, Clone, Debug)]
pub struct Settings {
    /// Address to listen on; port 0 takes a free one.
    #[arg(long, value_name = "ADDRESS", default_value_t = SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))]
    pub listen: SocketAddr,

    /// Name of a served model. May be repeated: the first is the base model, the others stand for
    /// its adapters and share no cached blocks with it.
    #[arg(long = "model", value_name = "NAME", default_value = "sim")]
    pub models: Vec<String>,

    /// Tokens in a cache block.
    #[arg(long, value_name = "TOKENS", default_value_t = number(16))]
    pub block_tokens: NonZeroU32,

    /// Size of the prefix cache, in blocks.
    #[arg(long, value_name = "BLOCKS", default_value_t = number(4096))]
    pub cache_blocks: NonZeroU32,

    /// Longest prompt and answer together, in tokens; never more than the cache holds.
    #[arg(long, value_name = "TOKENS", default_value_t = number(32_768))]
    pub context_tokens_max: NonZeroU32,

    /// Speed of computing prompts, in tokens a second.
    #[arg(long, value_name = "TOKENS", default_value_t = number(20_000))]
    pub prefill_tokens_per_second: NonZeroU32,

    /// Time for one token of every running answer, in milliseconds.
    #[arg(long, value_name = "MILLISECONDS", default_value_t = 20)]
    pub decode_ms: u64,

    /// Tokens computed in one step; a longer prompt is computed in chunks.
    #[arg(long, value_name = "TOKENS", default_value_t = number(2048))]
    pub batch_tokens_max: NonZeroU32,

    /// Requests computed at the same time; the next ones wait.
    #[arg(long, value_name = "REQUESTS", default_value_t = number(64))]
    pub running_max: NonZeroU32,

    /// Requests that may wait; the next one is answered with 503.
    #[arg(long, value_name = "REQUESTS", default_value_t = 1024)]
    pub queue_max: usize,

    /// Where block names start. Engines with the same seed give the same names.
    #[arg(long, value_name = "NUMBER", default_value_t = 0)]
    pub hash_seed: u64,

    /// Engines behind this address, each with a cache and cache events of its own.
    #[arg(long, value_name = "RANKS", default_value_t = NonZeroU16::MIN)]
    pub data_parallel_size: NonZeroU16,

    /// A model's own folder: prompts become the tokens that a real engine of that model would compute.
    /// Without it, four bytes of text make a token.
    #[arg(long, value_name = "FOLDER")]
    pub tokenizer: Option<PathBuf>,

    /// Serve the endpoints that render a request and do not compute it.
    #[arg(long)]
    pub enable_scale_out: bool,

    #[command(flatten)]
    pub kv: publisher::Settings,

    #[command(flatten)]
    pub handoff: handoff::Settings,

    #[command(flatten)]
    pub faults: Faults,
}

/// As without any argument.
impl Default for Settings {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
            models: vec!["sim".to_owned()],
            block_tokens: number(16),
            cache_blocks: number(4096),
            context_tokens_max: number(32_768),
            prefill_tokens_per_second: number(20_000),
            decode_ms: 20,
            batch_tokens_max: number(2048),
            running_max: number(64),
            queue_max: 1024,
            hash_seed: 0,
            data_parallel_size: NonZeroU16::MIN,
            tokenizer: None,
            enable_scale_out: false,
            kv: publisher::Settings::default(),
            handoff: handoff::Settings::default(),
            faults: Faults::default(),
        }
    }
}

impl Settings {
    pub(crate) fn engine(&self) -> engine::Settings {
        engine::Settings {
            block_tokens: self.block_tokens,
            capacity_blocks: self.cache_blocks,
            running_max: self.running_max,
            queue_max: self.queue_max,
            batch_tokens_max: self.batch_tokens_max,
            prefill_tokens_per_second: self.prefill_tokens_per_second,
            decode_time: Duration::from_millis(self.decode_ms),
            root: self.hash_seed,
        }
    }

    pub(crate) fn context_tokens(&self) -> usize {
        let cached = u64::from(self.block_tokens.get()) * u64::from(self.cache_blocks.get());
        cached.min(u64::from(self.context_tokens_max.get())) as usize
    }

    pub(crate) fn first_model(&self) -> &str {
        self.models.first().map_or("", String::as_str)
    }
}

const fn number(value: u32) -> NonZeroU32 {
    NonZeroU32::new(value).expect("the defaults are not zero")
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Arguments {
        #[command(flatten)]
        settings: Settings,
    }

    #[test]
    fn no_arguments_are_the_default() {
        let parsed = Arguments::parse_from(["sim"]).settings;
        assert_eq!(format!("{parsed:?}"), format!("{:?}", Settings::default()));
    }
}

//! Command-line arguments of a simulated engine.

use std::net::{Ipv4Addr, SocketAddr};
use std::num::{NonZeroU16, NonZeroU32};
use std::path::PathBuf;
use std::time::Duration;

use super::publisher::settings as publisher;
use super::transfer::settings as transfer;
use crate::http::listen_address::listen_address;
use crate::sim::fault::Faults;
use crate::sim::step_time::{AnswerTimes, StepTimes};
use crate::sim::{default_arguments, engine};
use crate::units::parse_milliseconds;

#[derive(clap::Args, Clone, Debug)]
pub struct Settings {
    /// Address to listen on; port 0 takes a free one.
    #[arg(long, value_name = "ADDRESS", default_value_t = SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), value_parser = listen_address)]
    pub listen: SocketAddr,

    /// Name of a served model. May be repeated: the first is the base model, the others are LoRA adapters of it,
    /// which share no cached blocks with it.
    #[arg(long = "model", value_name = "NAME", default_value = "sim")]
    pub models: Vec<String>,

    /// LoRA adapters that are in the GPU at the same time.
    #[arg(long, value_name = "ADAPTERS", default_value = "1")]
    pub max_loras: NonZeroU32,

    /// Tokens per cache block.
    #[arg(long, value_name = "TOKENS", default_value = "16")]
    pub block_tokens: NonZeroU32,

    /// Size of the prefix cache, in blocks.
    #[arg(long, value_name = "BLOCKS", default_value = "4096")]
    pub cache_blocks: NonZeroU32,

    /// Maximum context length (prompt and answer) in tokens; never more than the cache size.
    #[arg(long, value_name = "TOKENS", default_value = "32768")]
    pub context_tokens_max: NonZeroU32,

    /// Prefill speed, in tokens per second.
    #[arg(long, value_name = "TOKENS", default_value = "20000")]
    pub prefill_tokens_per_second: NonZeroU32,

    /// Duration of a step, which generates one token for every running request and computes prompts: without what its
    /// tokens take.
    #[arg(
        long = "decode-time",
        value_name = "DURATION",
        default_value = "20ms",
        value_parser = parse_milliseconds
    )]
    pub decode_ms: u64,

    #[command(flatten)]
    pub answer_times: AnswerTimes,

    /// Maximum tokens computed in one step; longer prompts are computed in chunks.
    #[arg(long, value_name = "TOKENS", default_value = "2048")]
    pub batch_tokens_max: NonZeroU32,

    /// Maximum running requests; further ones wait.
    #[arg(
        long,
        visible_alias = "max-num-seqs",
        value_name = "REQUESTS",
        default_value = "64"
    )]
    pub running_max: NonZeroU32,

    /// Maximum waiting requests; further ones are answered with 503.
    #[arg(long, value_name = "REQUESTS", default_value_t = 1024)]
    pub queue_max: usize,

    /// Number of data-parallel ranks: engines behind this address, each with its own cache and KV events.
    #[arg(long, value_name = "RANKS", default_value_t = NonZeroU16::MIN)]
    pub data_parallel_size: NonZeroU16,

    /// Model folder whose tokenizer and chat template are used. Without it, every four bytes of text are a token.
    #[arg(long, value_name = "FOLDER")]
    pub tokenizer: Option<PathBuf>,

    /// End longer answers of their own accord after this many tokens, with finish reason "stop", unless the request sets
    /// ignore_eos. Without it an answer ends at its limit.
    #[arg(long, value_name = "TOKENS")]
    pub stop_after: Option<NonZeroU32>,

    /// Serve no `/v1/responses`, as an engine that speaks chat completions only. Its streamed chats then have reasoning,
    /// tool calls and JSON where the request asks for them.
    #[arg(long)]
    pub no_responses: bool,

    /// Serve no `/v1/messages`, as engines without Anthropic's API.
    #[arg(long)]
    pub no_messages: bool,

    /// Serve the render endpoints, which tokenize a request without running it.
    #[arg(long)]
    pub enable_scale_out: bool,

    #[command(flatten)]
    pub kv: publisher::Settings,

    #[command(flatten)]
    pub transfer: transfer::Settings,

    /// `POST /sim/faults` sets them.
    #[arg(skip)]
    pub faults: Faults,
}

impl Default for Settings {
    fn default() -> Self {
        default_arguments()
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
            step_times: StepTimes::new(
                Duration::from_millis(self.decode_ms),
                self.answer_times,
                self.prefill_tokens_per_second.get().into(),
            ),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_is_a_command_line_without_arguments() {
        let settings = Settings::default();
        assert_eq!((settings.decode_ms, settings.queue_max), (20, 1024));
        assert_eq!(settings.models, ["sim"]);
        assert_eq!(settings.faults, Faults::default());
    }
}

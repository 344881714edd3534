//! The metrics of vLLM that a router reads, in the Prometheus text format. Pure.

use std::fmt::Write;

use crate::sim::engine::{Counters, Gauges, Settings};

pub(crate) const CONTENT_TYPE: &str = "text/plain; version=1.0.0; charset=utf-8";

pub(crate) fn render(
    model: &str,
    started_unix_seconds: f64,
    settings: &Settings,
    ranks: impl Iterator<Item = (Gauges, Counters)>,
) -> String {
    let (gauges, counters): (Vec<_>, Vec<_>) = ranks.unzip();
    let mut page = Page {
        text: String::with_capacity(4096),
        model,
    };
    page.family(
        "process_start_time_seconds",
        "gauge",
        "Start time of the process since unix epoch in seconds.",
    );
    page.line(format_args!(
        "process_start_time_seconds {started_unix_seconds}"
    ));
    page.gauges(&gauges);
    page.counters(&counters);
    page.sources(&counters);
    page.family(
        "vllm:cache_config_info",
        "gauge",
        "Information of the LLMEngine CacheConfig",
    );
    let block_tokens = settings.block_tokens;
    // vLLM has the blocks of all ranks in the sample of each.
    let blocks = u64::from(settings.capacity_blocks.get()) * gauges.len() as u64;
    for rank in 0..gauges.len() {
        page.line(format_args!(
            "vllm:cache_config_info{{block_size=\"{block_tokens}\",enable_prefix_caching=\"True\",engine=\"{rank}\",num_gpu_blocks=\"{blocks}\"}} 1.0"
        ));
    }
    page.text
}

/// vLLM's sample of adapters: a gauge whose labels are the news, and whose value is their time.
pub(crate) fn adapters(max: u32, running: &[String], waiting: &[String], now: f64) -> String {
    let (running, waiting) = (running.join(","), waiting.join(","));
    format!(
        "# HELP vllm:lora_requests_info Running stats on lora requests.\n\
         # TYPE vllm:lora_requests_info gauge\n\
         vllm:lora_requests_info{{max_lora=\"{max}\",running_lora_adapters=\"{running}\",waiting_lora_adapters=\"{waiting}\"}} {now}\n"
    )
}

struct Page<'a> {
    text: String,
    model: &'a str,
}

impl Page<'_> {
    fn gauges(&mut self, gauges: &[Gauges]) {
        type Row = (&'static str, &'static str, fn(&Gauges) -> f64);
        let rows: [Row; 3] = [
            (
                "num_requests_running",
                "Number of requests in model execution batches.",
                |gauges| gauges.running as f64,
            ),
            (
                "num_requests_waiting",
                "Number of requests waiting to be processed.",
                |gauges| gauges.waiting as f64,
            ),
            (
                "kv_cache_usage_perc",
                "KV-cache usage. 1 means 100 percent usage.",
                |gauges| gauges.kv_usage,
            ),
        ];
        for (name, help, value) in rows {
            self.samples(name, "gauge", help, gauges.iter().map(value));
        }
    }

    fn counters(&mut self, counters: &[Counters]) {
        type Row = (&'static str, &'static str, fn(&Counters) -> u64);
        let rows: [Row; 3] = [
            (
                "prefix_cache_hits_total",
                "Prefix cache hits, in terms of number of cached tokens.",
                |counters| counters.prefix_hits,
            ),
            (
                "prompt_tokens_total",
                "Number of prefill tokens processed.",
                |counters| counters.prompt_tokens,
            ),
            (
                "generation_tokens_total",
                "Number of generation tokens processed.",
                |counters| counters.generation_tokens,
            ),
        ];
        for (name, help, value) in rows {
            let values = counters.iter().map(|counters| value(counters) as f64);
            self.samples(name, "counter", help, values);
        }
    }

    /// Prompt tokens by source.
    fn sources(&mut self, counters: &[Counters]) {
        let model = self.label();
        let name = "vllm:prompt_tokens_by_source_total";
        self.family(name, "counter", "Number of prompt tokens by source.");
        for (rank, counters) in counters.iter().enumerate() {
            let (cached, received) = (counters.prefix_hits, counters.received_tokens);
            let computed = counters.prompt_tokens.saturating_sub(cached + received);
            for (source, tokens) in [
                ("local_compute", computed),
                ("local_cache_hit", cached),
                ("external_kv_transfer", received),
            ] {
                let tokens = tokens as f64;
                self.line(format_args!(
                    "{name}{{engine=\"{rank}\",model_name=\"{model}\",source=\"{source}\"}} {tokens:?}"
                ));
            }
        }
    }

    fn label(&self) -> String {
        self.model.replace('\\', "\\\\").replace('"', "\\\"")
    }

    /// One sample for each dp rank.
    fn samples(&mut self, name: &str, kind: &str, help: &str, values: impl Iterator<Item = f64>) {
        let model = self.label();
        self.family(&format!("vllm:{name}"), kind, help);
        for (rank, value) in values.enumerate() {
            self.line(format_args!(
                "vllm:{name}{{engine=\"{rank}\",model_name=\"{model}\"}} {value:?}"
            ));
        }
    }

    fn family(&mut self, name: &str, kind: &str, help: &str) {
        self.line(format_args!("# HELP {name} {help}"));
        self.line(format_args!("# TYPE {name} {kind}"));
    }

    fn line(&mut self, line: std::fmt::Arguments<'_>) {
        writeln!(self.text, "{line}").expect("writing to a string cannot fail");
    }
}

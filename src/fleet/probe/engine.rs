//! Parses an engine's `/metrics` and `/version`. Pure. Metric names are those of vLLM 0.32 and SGLang 0.5.

use std::collections::BTreeMap;

use crate::ids::Model;

/// The numbers of an engine's `/metrics` that the router uses.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct EngineMetrics {
    /// Whether the page says how many requests run. One of another engine may have other numbers alone.
    pub(super) has_load: bool,
    pub(super) running: u32,
    pub(super) waiting: u32,
    /// The part of `waiting` that the engine has deferred, where it reports that.
    pub(super) deferred: u32,
    /// Used part of the KV cache, 0 to 1, of the fullest rank.
    pub(super) kv_usage: f64,
    /// When the process started, in seconds since 1970. It identifies the process.
    pub(super) started: Option<f64>,
    /// Capacity of the prefix cache in tokens.
    pub(super) cache_tokens: Option<u64>,
    /// Tokens per KV block.
    pub(super) block_size: Option<u32>,
    pub(super) prefix_caching: Option<bool>,
    /// Prompt tokens whose KV blocks came from another engine, since the start of the process.
    pub(super) received_tokens: Option<u64>,
}

/// Parses the Prometheus text format. Ranks are added up; missing numbers stay zero.
pub(super) fn metrics(text: &str) -> EngineMetrics {
    let mut found = EngineMetrics::default();
    let mut for_capacity: Option<u32> = None;
    let first = first_processes(text);
    for line in text.lines() {
        let Some((name, labels, value)) = sample(line) else {
            continue;
        };
        match name {
            // With tensor parallelism every process of a rank has the same numbers.
            _ if name.starts_with("sglang:") && !is_first_process(labels, &first) => {}
            "vllm:num_requests_running" | "sglang:num_running_reqs" => {
                found.has_load = true;
                found.running = found.running.saturating_add(value as u32);
            }
            "vllm:num_requests_waiting" | "sglang:num_queue_reqs" => {
                found.waiting = found.waiting.saturating_add(value as u32)
            }
            // The others were deferred, for a LoRA adapter or for blocks from another engine.
            "vllm:num_requests_waiting_by_reason"
                if label(labels, "reason") == Some("capacity") =>
            {
                let others = for_capacity.unwrap_or(0);
                for_capacity = Some(others.saturating_add(value as u32));
            }
            "vllm:kv_cache_usage_perc" | "sglang:token_usage" => {
                found.kv_usage = found.kv_usage.max(value).min(1.0)
            }
            // NaN differs from itself: each page would look like that of a restarted engine.
            "process_start_time_seconds" if !value.is_nan() => found.started = Some(value),
            "vllm:cache_config_info" => {
                found.prefix_caching = match label(labels, "enable_prefix_caching") {
                    Some("True") => Some(true),
                    Some("False") => Some(false),
                    _ => found.prefix_caching,
                };
                let number = |name| label(labels, name)?.parse::<u64>().ok();
                let size = number("block_size").and_then(|size| u32::try_from(size).ok());
                found.block_size = size.filter(|size| *size > 0).or(found.block_size);
                if let (Some(size), Some(blocks)) = (number("block_size"), number("num_gpu_blocks"))
                {
                    // The sample of each rank has the blocks of all ranks.
                    let all = size.saturating_mul(blocks);
                    found.cache_tokens = found.cache_tokens.max(Some(all));
                }
            }
            "sglang:max_total_num_tokens" => {
                let others = found.cache_tokens.unwrap_or(0);
                found.cache_tokens = Some(others.saturating_add(value as u64));
            }
            "sglang:page_size" if value >= 1.0 => found.block_size = Some(value as u32),
            "vllm:prompt_tokens_by_source_total"
                if label(labels, "source") == Some("external_kv_transfer") =>
            {
                let others = found.received_tokens.unwrap_or(0);
                found.received_tokens = Some(others.saturating_add(value as u64));
            }
            _ => {}
        }
    }
    found.deferred = for_capacity.map_or(0, |count| found.waiting.saturating_sub(count));
    found
}

#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Adapters {
    /// How many it has in its GPU at the same time.
    pub(super) slots: u32,
    /// The adapters of the requests that it computes.
    pub(super) running: Vec<Model>,
}

/// What the newest `vllm:lora_requests_info` says: its labels are the news, and its value is their time.
pub(super) fn adapters(text: &str) -> Option<Adapters> {
    const NAME: &str = "vllm:lora_requests_info";
    let samples = text.lines().filter(|line| line.starts_with(NAME));
    let samples = samples
        .filter_map(sample)
        .filter(|(name, ..)| *name == NAME);
    let (_, labels, _) = samples.max_by(|(.., one), (.., other)| one.total_cmp(other))?;
    let running = label(labels, "running_lora_adapters").unwrap_or_default();
    let running = running.split(',').map(str::trim);
    Some(Adapters {
        slots: label(labels, "max_lora")?.parse().ok()?,
        running: running
            .filter(|name| !name.is_empty())
            .map(Model::from)
            .collect(),
    })
}

/// SGLang's lowest tp rank of each dp rank. With DP attention the tp ranks go on from one dp rank to the next.
fn first_processes(text: &str) -> BTreeMap<&str, u32> {
    const NAME: &str = "sglang:num_running_reqs";
    let samples = text.lines().filter(|line| line.starts_with(NAME));
    let samples = samples
        .filter_map(sample)
        .filter(|(name, ..)| *name == NAME);
    let mut first = BTreeMap::new();
    for (_, labels, _) in samples {
        if let Some(dp_rank) = label(labels, "dp_rank") {
            let tp_rank = rank(labels, "tp_rank");
            let lowest = first.entry(dp_rank).or_insert(tp_rank);
            *lowest = tp_rank.min(*lowest);
        }
    }
    first
}

/// Whether a sample is of the first of several processes that compute the same requests.
fn is_first_process(labels: &str, first: &BTreeMap<&str, u32>) -> bool {
    let dp_rank = label(labels, "dp_rank");
    let lowest = dp_rank.and_then(|dp_rank| first.get(dp_rank).copied());
    rank(labels, "pp_rank") == 0 && rank(labels, "tp_rank") == lowest.unwrap_or(0)
}

/// 0 if the label is absent, and another one if it is no number.
fn rank(labels: &str, name: &str) -> u32 {
    label(labels, name).map_or(0, |rank| rank.parse().unwrap_or(u32::MAX))
}

/// The `version` of `{"version":"0.32.0"}`.
pub(super) fn version(body: &[u8]) -> Option<String> {
    #[derive(serde::Deserialize)]
    struct Version {
        version: String,
    }
    serde_json::from_slice::<Version>(body)
        .ok()
        .map(|page| page.version)
}

/// `name{labels} value` -> its three parts.
fn sample(line: &str) -> Option<(&str, &str, f64)> {
    if line.starts_with('#') {
        return None;
    }
    // Label values may contain spaces and braces, so the value is what follows the last brace.
    let (name, labels, value) = match line.find('{') {
        Some(open) => {
            let close = line.rfind('}').filter(|close| *close > open)?;
            (&line[..open], &line[open + 1..close], &line[close + 1..])
        }
        None => {
            let (name, value) = line.split_once(' ')?;
            (name, "", value)
        }
    };
    let value = value.split_whitespace().next()?.parse().ok()?;
    Some((name, labels, value))
}

fn label<'a>(labels: &'a str, name: &str) -> Option<&'a str> {
    let start = labels
        .match_indices(name)
        .find(|(at, _)| {
            (*at == 0 || labels[..*at].ends_with(','))
                && labels[at + name.len()..].starts_with("=\"")
        })?
        .0;
    labels[start + name.len() + 2..].split('"').next()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn two_ranks_are_added_up() {
        let page = "# TYPE vllm:num_requests_running gauge\n\
            vllm:num_requests_running{engine=\"0\",model_name=\"a b}\"} 2.0\n\
            vllm:num_requests_running{engine=\"1\",model_name=\"a b}\"} 1.0\n\
            vllm:num_requests_waiting{engine=\"0\"} 4.0\n\
            vllm:kv_cache_usage_perc{engine=\"0\"} 0.25\n\
            vllm:kv_cache_usage_perc{engine=\"1\"} 0.5\n\
            process_start_time_seconds 1.79519653478802e+09\n\
            vllm:cache_config_info{_block_size_resolved=\"True\",block_size=\"32\",enable_prefix_caching=\"False\",num_gpu_blocks=\"160\",num_gpu_blocks_override=\"1\"} 1.0\n\
            vllm:prompt_tokens_by_source_total{engine=\"0\",source=\"local_compute\"} 7.0\n\
            vllm:prompt_tokens_by_source_total{engine=\"0\",source=\"external_kv_transfer\"} 824.0\n\
            vllm:prompt_tokens_by_source_total{engine=\"1\",source=\"external_kv_transfer\"} 1.0\n";
        assert_eq!(
            metrics(page),
            EngineMetrics {
                has_load: true,
                running: 3,
                waiting: 4,
                deferred: 0,
                kv_usage: 0.5,
                started: Some(1_795_196_534.788_02),
                cache_tokens: Some(32 * 160),
                block_size: Some(32),
                prefix_caching: Some(false),
                received_tokens: Some(825),
            }
        );
    }

    #[test]
    fn the_caches_of_all_ranks_are_in_the_sample_of_each() {
        let sample = |engine: u32| {
            format!(
                "vllm:cache_config_info{{block_size=\"16\",engine=\"{engine}\",num_gpu_blocks=\"800\"}} 1.0\n"
            )
        };
        let found = metrics(&(sample(0) + &sample(1)));
        assert_eq!(found.cache_tokens, Some(16 * 800));
    }

    #[test]
    fn what_is_deferred_is_known_where_the_engine_reports_it() {
        const WAITING: &str = "vllm:num_requests_waiting";
        let by_reason = |engine: u32, reason: &str, count: &str| {
            format!("{WAITING}_by_reason{{engine=\"{engine}\",reason=\"{reason}\"}} {count}\n")
        };
        let all = format!("{WAITING}{{engine=\"0\"}} 5.0\n{WAITING}{{engine=\"1\"}} 2.0\n");
        let ranks = by_reason(0, "capacity", "1.0") + &by_reason(1, "capacity", "2.0");
        let deferred = by_reason(0, "deferred", "4.0") + &by_reason(1, "deferred", "0.0");
        let table = [
            ("an older engine", String::new(), 0),
            ("two ranks", ranks + &deferred, 4),
            ("all wait for slots", by_reason(0, "capacity", "7.0"), 0),
            ("none waits for a slot", by_reason(0, "capacity", "0.0"), 7),
            ("no known reason", by_reason(0, "moon", "7.0"), 0),
            ("more than all", by_reason(0, "capacity", "1e300"), 0),
            ("less than none", by_reason(0, "capacity", "-1"), 7),
            ("no number", by_reason(0, "capacity", "NaN"), 7),
        ];
        for (what, more, expected) in table {
            let found = metrics(&(all.clone() + &more));
            assert_eq!((found.waiting, found.deferred), (7, expected), "{what}");
        }
    }

    #[test]
    fn numbers_that_are_none_restart_no_engine_and_fill_no_cache() {
        for (value, expected) in [("NaN", 0.0), ("-1", 0.0), ("+Inf", 1.0), ("1e308", 1.0)] {
            let page =
                format!("vllm:kv_cache_usage_perc {value}\nprocess_start_time_seconds NaN\n");
            let found = metrics(&page);
            assert_eq!(found.kv_usage, expected, "{value}");
            assert_eq!(found.started, None);
        }
    }

    #[test]
    fn the_metrics_of_sglang_are_read_once_for_each_dp_rank() {
        let page = "sglang:num_running_reqs{dp_rank=\"0\",model_name=\"m\",pp_rank=\"0\",tp_rank=\"0\"} 2.0\n\
            sglang:num_running_reqs{dp_rank=\"0\",model_name=\"m\",pp_rank=\"0\",tp_rank=\"1\"} 2.0\n\
            sglang:num_running_reqs{dp_rank=\"1\",model_name=\"m\",pp_rank=\"0\",tp_rank=\"0\"} 1.0\n\
            sglang:num_queue_reqs{dp_rank=\"0\",model_name=\"m\",tp_rank=\"0\"} 4.0\n\
            sglang:token_usage{dp_rank=\"0\",model_name=\"m\",tp_rank=\"0\"} 0.25\n\
            sglang:max_total_num_tokens{engine_type=\"unified\",model_name=\"tiny\",moe_ep_rank=\"0\",pp_rank=\"0\",tp_rank=\"0\"} 1024.0\n\
            sglang:page_size{engine_type=\"unified\",model_name=\"tiny\",moe_ep_rank=\"0\",pp_rank=\"0\",tp_rank=\"0\"} 16.0\n";
        assert_eq!(
            metrics(page),
            EngineMetrics {
                has_load: true,
                running: 3,
                waiting: 4,
                kv_usage: 0.25,
                cache_tokens: Some(1_024),
                block_size: Some(16),
                ..EngineMetrics::default()
            }
        );
    }

    #[test]
    fn every_dp_rank_of_sglang_counts_with_dp_attention() {
        // Two dp ranks with two tp ranks each, which are numbered through.
        let process = |dp_rank: u32, tp_rank: u32| {
            let labels = format!("dp_rank=\"{dp_rank}\",pp_rank=\"0\",tp_rank=\"{tp_rank}\"");
            format!(
                "sglang:num_running_reqs{{{labels}}} 2.0\nsglang:max_total_num_tokens{{{labels}}} 1024.0\n"
            )
        };
        let page = process(1, 3) + &process(1, 2) + &process(0, 1) + &process(0, 0);
        let found = metrics(&page);
        assert_eq!((found.running, found.cache_tokens), (4, Some(2_048)));
    }

    #[test]
    fn the_newest_report_of_adapters_counts() {
        let line = |running: &str, waiting: &str, at: f64| {
            format!(
                "vllm:lora_requests_info{{max_lora=\"4\",running_lora_adapters=\"{running}\",waiting_lora_adapters=\"{waiting}\"}} {at}\n"
            )
        };
        let page =
            line("old", "", 1.7e9) + &line("sql,org/chat", "x", 1.79e9) + &line("", "", 1.75e9);
        let expected = Adapters {
            slots: 4,
            running: vec!["sql".into(), "org/chat".into()],
        };
        assert_eq!(adapters(&page), Some(expected));
        let idle = Adapters {
            slots: 4,
            running: Vec::new(),
        };
        assert_eq!(adapters(&line("", "", 1.0)), Some(idle));
        assert_eq!(adapters("vllm:num_requests_running 1.0\n"), None);
    }

    #[test]
    fn another_page_has_no_metrics() {
        assert_eq!(
            metrics("{\"detail\":\"Not Found\"}"),
            EngineMetrics::default()
        );
        assert_eq!(version(b"<html>"), None);
        assert_eq!(
            version(b"{\"version\":\"0.32.0\"}").as_deref(),
            Some("0.32.0")
        );
    }

    proptest! {
        #[test]
        fn no_page_makes_it_panic(page in "(vllm:[a-z_]{0,12}|[a-z\"=,{} é\n]{0,8}|\\{|\\}){0,20}") {
            metrics(&page);
        }
    }
}

//! Metrics of the process itself: its version, what it uses of the machine, and lost log lines.

use std::fs;

use rustix::param::page_size;
use rustix::process::{Resource, getrlimit};
use rustix::time::{ClockId, clock_gettime};

use super::metrics::Registry;
use super::{log_lines_dropped, unix_ms};

/// Registers the metrics. They are read at each scrape.
pub fn register(registry: &Registry) {
    let info = registry.gauges(
        "warmroute_build_info",
        "Always 1; the label names the version that runs.",
        &["version"],
    );
    info.with_label_values(&[env!("CARGO_PKG_VERSION")]).set(1);
    let dropped = registry.counter(
        "warmroute_log_lines_dropped_total",
        "Log lines dropped because standard error was blocked or closed.",
    );
    let cpu = registry.real_counter(
        "process_cpu_seconds_total",
        "User and system CPU time of the process.",
    );
    let resident = registry.gauge("process_resident_memory_bytes", "Resident memory.");
    let open_fds = registry.gauge("process_open_fds", "Open file descriptors.");
    let max_fds = registry.gauge(
        "process_max_fds",
        "File descriptors that the process may open (RLIMIT_NOFILE).",
    );
    let start = registry.real_gauge(
        "process_start_time_seconds",
        "When the process started, in seconds since 1970.",
    );
    start.set(unix_ms() as f64 / 1e3);
    registry.on_scrape(move || {
        dropped.inc_by(log_lines_dropped().saturating_sub(dropped.get()));
        let used = clock_gettime(ClockId::ProcessCPUTime);
        let used = used.tv_sec as f64 + used.tv_nsec as f64 / 1e9;
        cpu.inc_by((used - cpu.get()).max(0.0));
        if let Some(bytes) = resident_bytes() {
            resident.set(bytes);
        }
        // Reading the directory opens one more.
        if let Ok(open) = fs::read_dir("/proc/self/fd") {
            open_fds.set(open.count() as i64 - 1);
        }
        max_fds.set(descriptor_limit().map_or(i64::MAX, |limit| limit as i64));
    });
}

/// File descriptors that the process may open; `None` for no limit.
pub fn descriptor_limit() -> Option<u64> {
    getrlimit(Resource::Nofile).current
}

/// The second field of `/proc/self/statm`, which counts pages. Linux only.
fn resident_bytes() -> Option<i64> {
    let statm = fs::read_to_string("/proc/self/statm").ok()?;
    let pages: i64 = statm.split_whitespace().nth(1)?.parse().ok()?;
    Some(pages * page_size() as i64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_uses_memory_files_and_time() {
        let registry = Registry::default();
        register(&registry);
        let text = registry.text();
        let value = |name: &str| -> f64 {
            let line = text.lines().find(|line| line.starts_with(name)).unwrap();
            line.rsplit(' ').next().unwrap().parse().unwrap()
        };
        assert_eq!(value("warmroute_build_info{version=\""), 1.0);
        assert!(value("process_resident_memory_bytes ") > 1e6);
        assert!(value("process_cpu_seconds_total ") > 0.0);
        assert!(value("process_open_fds ") >= 3.0);
        assert!(value("process_max_fds ") >= value("process_open_fds "));
        assert!(value("process_start_time_seconds ") > 1.7e9);
    }
}

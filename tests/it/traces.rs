//! Traces, as a collector gets them.

mod collector;
mod export;
mod legs;
mod places;
mod propagation;
mod requests;

use std::time::Duration;

use warmroute::config::Config;
use warmroute::traces::Settings;
use warmroute::traces::settings::Protocol;

use self::collector::Collector;

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const PARENT: &str = "00f067aa0ba902b7";

/// What a client sends whose span is sampled, or not.
fn traceparent(is_sampled: bool) -> String {
    format!("00-{TRACE}-{PARENT}-0{}", u8::from(is_sampled))
}

/// Has traces sent to a collector, soon.
fn to(collector: &Collector, protocol: Protocol) -> impl FnOnce(&mut Config) {
    let endpoint = format!("http://{}", collector.address);
    move |config| config.traces = Some(settings(endpoint, protocol))
}

fn settings(endpoint: String, protocol: Protocol) -> Settings {
    let mut settings = Settings {
        endpoint,
        protocol,
        ..Settings::default()
    };
    settings.advanced.export_interval = Duration::from_millis(10);
    settings
}

//! OpenTelemetry's environment variables. Pure: they are read through a function.

use std::collections::BTreeMap;
use std::time::Duration;

use percent_encoding::percent_decode_str;

/// Reads variables, and collects what is wrong with them: as OpenTelemetry asks for, a wrong value is ignored with a
/// warning.
pub(super) struct Environment<'a> {
    read: &'a dyn Fn(&str) -> Option<String>,
    pub(super) warnings: Vec<String>,
}

impl<'a> Environment<'a> {
    pub(super) fn new(read: &'a dyn Fn(&str) -> Option<String>) -> Self {
        Self {
            read,
            warnings: Vec::new(),
        }
    }

    /// A variable that is set and not empty.
    pub(super) fn text(&self, name: &str) -> Option<String> {
        let text = (self.read)(name)?;
        let text = text.trim();
        (!text.is_empty()).then(|| text.to_owned())
    }

    /// `OTEL_EXPORTER_OTLP_TRACES_...`, or else `OTEL_EXPORTER_OTLP_...`: its name and value.
    pub(super) fn of_exporter(&self, name: &str) -> Option<(String, String)> {
        let names = ["OTEL_EXPORTER_OTLP_TRACES_", "OTEL_EXPORTER_OTLP_"];
        names.into_iter().find_map(|prefix| {
            let name = format!("{prefix}{name}");
            let text = self.text(&name)?;
            Some((name, text))
        })
    }

    pub(super) fn is_true(&self, name: &str) -> bool {
        self.text(name)
            .is_some_and(|text| text.eq_ignore_ascii_case("true"))
    }

    /// A variable that `parse` reads.
    pub(super) fn parsed<T>(
        &mut self,
        name: &str,
        expected: &str,
        parse: impl FnOnce(&str) -> Option<T>,
    ) -> Option<T> {
        let text = self.text(name)?;
        let parsed = parse(&text);
        if parsed.is_none() {
            self.wrong(name, &text, expected);
        }
        parsed
    }

    /// A variable with a value that is not shown.
    pub(super) fn unusable(&mut self, name: &str, expected: &str) {
        self.warnings
            .push(format!("{name} is ignored: expected {expected}"));
    }

    pub(super) fn wrong(&mut self, name: &str, text: &str, expected: &str) {
        let warning = format!("{name}={text} is ignored: expected {expected}");
        self.warnings.push(warning);
    }

    /// Milliseconds, of which 0 are none.
    pub(super) fn milliseconds(&mut self, name: &str) -> Option<Duration> {
        self.parsed(name, "milliseconds", |text| {
            let millis: u64 = text.parse().ok()?;
            (millis > 0).then(|| Duration::from_millis(millis))
        })
    }

    pub(super) fn count(&mut self, name: &str) -> Option<u32> {
        self.parsed(name, "a number from 1", |text| {
            text.parse().ok().filter(|count| *count > 0)
        })
    }

    /// `key1=value1,key2=value2`, with values in percent encoding.
    pub(super) fn pairs(&mut self, name: &str) -> BTreeMap<String, String> {
        let mut pairs = BTreeMap::new();
        for entry in self.text(name).unwrap_or_default().split(',') {
            let Some((key, value)) = entry.split_once('=') else {
                if !entry.trim().is_empty() {
                    self.warnings
                        .push(format!("an entry of {name} is ignored: expected KEY=VALUE"));
                }
                continue;
            };
            let value = percent_decode_str(value.trim()).decode_utf8_lossy();
            pairs.insert(key.trim().to_owned(), value.into_owned());
        }
        pairs
    }
}

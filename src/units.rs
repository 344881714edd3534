//! Durations and sizes as a configuration writes them: `30s`, `250ms`, `30d`, `64MiB`, `4KiB`.
//!
//! Settings keep `std::time::Duration` and plain integers; a field says how it is written with
//! `#[serde(with = "DurationText")]` or `#[serde(with = "SizeText")]`. In the schema such a field has the
//! formats named here, by which the configuration's reader knows what to accept.

use std::borrow::Cow;
use std::time::Duration;

use bytesize::ByteSize;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{Deserialize, Deserializer, Error};
use serde::ser::{Error as _, Serializer};

/// The schema's `format` of a duration.
pub const DURATION: &str = "duration with unit";
/// The schema's `format` of a size.
pub const SIZE: &str = "size with unit";

/// Reads and writes a `Duration` as text such as `30s`.
#[derive(Debug)]
pub struct DurationText;

/// Reads and writes a number of bytes as text such as `64MiB`.
#[derive(Debug)]
pub struct SizeText;

/// `30s`, `1m 30s`, `250ms`, `30d`; of bare numbers only 0.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let expected = || "expected a duration such as `30s`, `250ms` or `30d`".to_owned();
    if text == "0" {
        return Ok(Duration::ZERO);
    }
    // One number with its unit after the other: the library panics at a sum that is a little too large, and clients send
    // durations, too.
    let (mut sum, mut rest) = (Duration::ZERO, text);
    loop {
        let unit = rest.find(char::is_alphabetic).ok_or_else(expected)?;
        let length = rest[unit..].find(|char: char| char.is_ascii_digit());
        let (first, others) = rest.split_at(length.map_or(rest.len(), |length| unit + length));
        let first = humantime::parse_duration(first).map_err(|_| expected())?;
        sum = sum.checked_add(first).ok_or_else(expected)?;
        if others.is_empty() {
            return Ok(sum);
        }
        rest = others;
    }
}

/// A duration such as `250ms` as whole milliseconds, at most a year: for arguments of the command line.
pub fn parse_milliseconds(text: &str) -> Result<u64, String> {
    const YEAR: Duration = Duration::from_secs(365 * 24 * 3_600);
    let duration = parse_duration(text)?;
    if duration > YEAR {
        return Err("expected at most `365d`".to_owned());
    }
    if duration.subsec_nanos() % 1_000_000 != 0 {
        return Err("expected whole milliseconds".to_owned());
    }
    Ok(duration.as_millis() as u64)
}

/// A duration as [`parse_milliseconds`] reads it, which must not be 0.
pub fn parse_nonzero_milliseconds(text: &str) -> Result<u64, String> {
    match parse_milliseconds(text)? {
        0 => Err("expected at least `1ms`".to_owned()),
        millis => Ok(millis),
    }
}

/// `64MiB`, `4KiB`, `10MB`; of bare numbers only 0.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let expected = || "expected a size such as `64MiB` or `4KiB`".to_owned();
    let is_number = |text: &str| text.parse::<f64>().is_ok();
    if text != "0" && (is_number(text) || text.starts_with('-')) {
        return Err(expected());
    }
    text.parse::<ByteSize>()
        .map(|size| size.as_u64())
        .map_err(|_| expected())
}

/// The shortest exact form with one unit.
pub fn format_duration(duration: Duration) -> String {
    let nanos = duration.as_nanos();
    const UNITS: [(u128, &str); 6] = [
        (86_400_000_000_000, "d"),
        (3_600_000_000_000, "h"),
        (60_000_000_000, "m"),
        (1_000_000_000, "s"),
        (1_000_000, "ms"),
        (1_000, "us"),
    ];
    let exact = UNITS.iter().find(|(unit, _)| nanos.is_multiple_of(*unit));
    match exact {
        _ if nanos == 0 => "0s".to_owned(),
        Some((unit, name)) => format!("{}{name}", nanos / unit),
        None => format!("{nanos}ns"),
    }
}

/// The shortest exact form with one binary unit.
pub fn format_size(bytes: u64) -> String {
    const UNITS: [(u64, &str); 4] = [
        (1 << 40, "TiB"),
        (1 << 30, "GiB"),
        (1 << 20, "MiB"),
        (1 << 10, "KiB"),
    ];
    let exact = UNITS
        .iter()
        .find(|(unit, _)| bytes != 0 && bytes.is_multiple_of(*unit));
    match exact {
        Some((unit, name)) => format!("{}{name}", bytes / unit),
        None => format!("{bytes}B"),
    }
}

impl DurationText {
    pub fn serialize<S: Serializer>(value: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&format_duration(*value))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
        let text = Cow::<str>::deserialize(deserializer)?;
        parse_duration(&text).map_err(D::Error::custom)
    }
}

impl SizeText {
    pub fn serialize<T, S>(value: &T, serializer: S) -> Result<S::Ok, S::Error>
    where
        T: Copy + TryInto<u64>,
        S: Serializer,
    {
        let bytes = (*value).try_into();
        let bytes = bytes.map_err(|_| S::Error::custom("size is out of range"))?;
        serializer.serialize_str(&format_size(bytes))
    }

    pub fn deserialize<'de, T, D>(deserializer: D) -> Result<T, D::Error>
    where
        T: TryFrom<u64>,
        D: Deserializer<'de>,
    {
        let text = Cow::<str>::deserialize(deserializer)?;
        let bytes = parse_size(&text).map_err(D::Error::custom)?;
        T::try_from(bytes).map_err(|_| D::Error::custom(format!("`{text}` is too large")))
    }
}

impl JsonSchema for DurationText {
    fn schema_name() -> Cow<'static, str> {
        "Duration".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": "string", "format": DURATION})
    }

    fn inline_schema() -> bool {
        true
    }
}

impl JsonSchema for SizeText {
    fn schema_name() -> Cow<'static, str> {
        "Size".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": "string", "format": SIZE})
    }

    fn inline_schema() -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_has_a_unit() {
        let check = |text, expected: Option<u64>| {
            let expected = expected.map(Duration::from_millis);
            assert_eq!(parse_duration(text).ok(), expected, "{text}");
        };
        check("30s", Some(30_000));
        check("250ms", Some(250));
        check("30d", Some(2_592_000_000));
        check("1h 30m", Some(5_400_000));
        check("0", Some(0));
        check("0s", Some(0));
        check("1.5m500 ms", Some(90_500));
        for wrong in ["30", "", "s", "-1s", "30 parsecs", "1.5", "1h 30"] {
            check(wrong, None);
        }
    }

    #[test]
    fn a_sum_that_no_duration_can_have_is_refused() {
        let most = u64::MAX;
        assert_eq!(
            parse_duration(&format!("{most}s")),
            Ok(Duration::from_secs(most))
        );
        for more in ["1s", "1000ms", "999999999ns 1ns", "1ns 1000ms"] {
            let text = format!("{most}s {more}");
            assert!(parse_duration(&text).is_err(), "{text}");
        }
    }

    #[test]
    fn an_argument_is_whole_milliseconds_of_at_most_a_year() {
        assert_eq!(parse_milliseconds("1m 250ms"), Ok(60_250));
        assert_eq!(parse_milliseconds("365d"), Ok(31_536_000_000));
        assert_eq!(parse_milliseconds("0s"), Ok(0));
        for wrong in ["366d", "1us", "250"] {
            assert!(parse_milliseconds(wrong).is_err(), "{wrong}");
        }
        assert!(parse_nonzero_milliseconds("0s").is_err());
        assert_eq!(parse_nonzero_milliseconds("1ms"), Ok(1));
    }

    #[test]
    fn a_size_has_a_unit() {
        let check = |text, expected: Option<u64>| {
            assert_eq!(parse_size(text).ok(), expected, "{text}");
        };
        check("64MiB", Some(64 << 20));
        check("10 MB", Some(10_000_000));
        check("1GiB", Some(1 << 30));
        check("64B", Some(64));
        check("0", Some(0));
        for wrong in ["64", "", "MiB", "-1KiB", "1.5", "64 chars", "1e3"] {
            check(wrong, None);
        }
    }

    #[test]
    fn what_is_written_reads_back() {
        for millis in [0, 1, 999, 1_000, 90_000, 3_600_000, 2_592_000_000] {
            let duration = Duration::from_millis(millis);
            assert_eq!(parse_duration(&format_duration(duration)), Ok(duration));
        }
        for bytes in [0, 1, 1_000, 1_024, 1_500, 64 << 20, 3 << 40] {
            assert_eq!(parse_size(&format_size(bytes)), Ok(bytes));
        }
        assert_eq!(format_duration(Duration::from_secs(90)), "90s");
        assert_eq!(format_size(64 << 20), "64MiB");
    }
}

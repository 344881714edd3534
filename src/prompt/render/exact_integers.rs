//! Integers above 64 bits in JSON. Python keeps all their digits, and a template may print them; the parser used here makes
//! them floats. So they are replaced by marked texts before a text is parsed. Pure.

use std::borrow::Cow;

/// Begins a text that stands for an integer. A client that sends it in a text of its own gets a number's text there.
const MARK: &str = "\u{f8ff}integer ";

/// Numbers of fewer digits fit into 64 bits.
const LONG: usize = 19;

/// The digits that a text stands for, if it does.
pub(super) fn digits(text: &str) -> Option<&str> {
    text.strip_prefix(MARK)
}

/// A JSON text with its long integers marked.
pub(super) fn marked(json: &[u8]) -> Cow<'_, [u8]> {
    if !has_digit_run(json) {
        return Cow::Borrowed(json);
    }
    let mut marked = Vec::new();
    let mut copied = 0;
    let mut at = 0;
    let mut is_in_text = false;
    while at < json.len() {
        match json[at] {
            b'\\' if is_in_text => at += 2,
            b'"' => {
                is_in_text = !is_in_text;
                at += 1;
            }
            b'-' | b'0'..=b'9' if !is_in_text => {
                let end = json[at..].iter().position(|byte| !is_number_byte(*byte));
                let end = end.map_or(json.len(), |length| at + length);
                if let Some(digits) = long_integer(&json[at..end]) {
                    marked.extend_from_slice(&json[copied..at]);
                    marked.extend_from_slice(format!("\"{MARK}{digits}\"").as_bytes());
                    copied = end;
                }
                at = end;
            }
            _ => at += 1,
        }
    }
    if copied == 0 {
        return Cow::Borrowed(json);
    }
    marked.extend_from_slice(&json[copied..]);
    Cow::Owned(marked)
}

fn is_number_byte(byte: u8) -> bool {
    byte.is_ascii_digit() || matches!(byte, b'-' | b'+' | b'.' | b'e' | b'E')
}

/// The digits of an integer that 64 bits do not hold.
fn long_integer(number: &[u8]) -> Option<&str> {
    let number = std::str::from_utf8(number).ok()?;
    let digits = number.strip_prefix('-').unwrap_or(number);
    let is_integer = !digits.is_empty()
        && digits.bytes().all(|byte| byte.is_ascii_digit())
        && (digits == "0" || !digits.starts_with('0'));
    let fits = number.parse::<i64>().is_ok() || number.parse::<u64>().is_ok();
    (is_integer && !fits).then_some(number)
}

/// Whether there are enough digits in a row. Looks at few of the bytes, since a run covers every nineteenth one.
fn has_digit_run(json: &[u8]) -> bool {
    let is_digit = |at: &usize| json[*at].is_ascii_digit();
    let mut at = LONG - 1;
    while at < json.len() {
        if !is_digit(&at) {
            at += LONG;
            continue;
        }
        let before = (0..at).rev().take_while(is_digit).count();
        let after = (at + 1..json.len()).take_while(is_digit).count();
        if before + 1 + after >= LONG {
            return true;
        }
        at += after + LONG;
    }
    false
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn check(json: &str, expected: &str) {
        assert_eq!(
            marked(json.as_bytes()),
            expected.replace('#', MARK).as_bytes()
        );
    }

    #[test]
    fn only_integers_above_64_bits_are_marked() {
        check(
            "[1, 18446744073709551615, -9223372036854775808]",
            "[1, 18446744073709551615, -9223372036854775808]",
        );
        check(
            "[18446744073709551616,-9223372036854775809 ,1]",
            "[\"#18446744073709551616\",\"#-9223372036854775809\" ,1]",
        );
        check(
            "{\"a\":123456789012345678901234567890}",
            "{\"a\":\"#123456789012345678901234567890\"}",
        );
        check("100000000000000000000", "\"#100000000000000000000\"");
        for other in [
            "[100000000000000000000.0, 100000000000000000000e1]",
            "\"100000000000000000000\"",
            "[\"a\\\"100000000000000000000\", 1]",
            "00000000000000000000001",
            "\"\\",
            "-",
        ] {
            check(other, other);
        }
        assert_eq!(digits(&format!("{MARK}12")), Some("12"));
        assert_eq!(digits("12"), None);
    }

    proptest! {
        #[test]
        fn what_has_no_long_number_stays(json in "[-0-9a-z\"\\\\{}:,. ]{0,120}") {
            let value = |json: &[u8]| serde_json::from_slice::<serde_json::Value>(json).ok();
            let has_long = json.split(|char: char| !char.is_ascii_digit()).any(|run| run.len() >= LONG);
            let marked = marked(json.as_bytes());
            if !has_long {
                prop_assert_eq!(value(&marked), value(json.as_bytes()));
            }
        }

        #[test]
        fn a_run_of_digits_is_found_wherever_it_is(before in "[a-z0-9]{0,60}", length in 19usize..40, after in "[a-z]{0,60}") {
            let text = format!("{before}{}{after}", "1".repeat(length));
            prop_assert!(has_digit_run(text.as_bytes()));
        }
    }
}

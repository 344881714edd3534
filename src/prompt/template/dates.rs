//! `strftime` as Python's library has it. Pure: the time is an argument.

use jiff::Zoned;
use jiff::fmt::strtime;

/// What is no directive stays as it is.
pub(super) fn format(format: &str, time: &Zoned) -> Result<String, jiff::Error> {
    let mut out = String::new();
    let mut rest = format;
    while let Some(at) = rest.find('%') {
        let (before, after) = rest.split_at(at);
        out.push_str(before);
        let options = after[1..].trim_start_matches(['-', '_', '^', '#']);
        let options = options.trim_start_matches(|char: char| char.is_ascii_digit());
        // Other digits and eras exist in no common locale.
        let kind = options.strip_prefix(['E', 'O']).unwrap_or(options);
        let Some(char) = kind.chars().next() else {
            out.push_str(after);
            return Ok(out);
        };
        let length = after.len() - kind.len() + char.len_utf8();
        let directive = &after[..length];
        rest = &after[length..];
        match char {
            'c' => out.push_str(&strtime::format("%a %b %e %H:%M:%S %Y", time)?),
            'x' => out.push_str(&strtime::format("%m/%d/%y", time)?),
            'X' => out.push_str(&strtime::format("%H:%M:%S", time)?),
            'r' => out.push_str(&strtime::format("%I:%M:%S %p", time)?),
            'f' => out.push_str(&format!("{:06}", time.subsec_nanosecond() / 1_000)),
            'a' | 'A' | 'b' | 'B' | 'C' | 'd' | 'D' | 'e' | 'F' | 'g' | 'G' | 'h' | 'H' | 'I'
            | 'j' | 'k' | 'l' | 'm' | 'M' | 'n' | 'p' | 'P' | 'R' | 's' | 'S' | 't' | 'T' | 'u'
            | 'U' | 'V' | 'w' | 'W' | 'y' | 'Y' | 'z' | 'Z' | '%' => {
                let options = &after[..after.len() - options.len()];
                out.push_str(&strtime::format(format!("{options}{char}"), time)?);
            }
            _ => out.push_str(directive),
        }
    }
    out.push_str(rest);
    Ok(out)
}

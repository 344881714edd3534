//! Finds the model in a form (`multipart/form-data`), as uploads of audio are sent. Pure.
//!
//! Rights and limits hang on the model that is found here, and the engine reads the form once more. Readers of forms
//! differ in what they make of anything unusual, so a form that leaves a choice is refused.

use std::borrow::Cow;

use memchr::memmem;

use super::body::PeekedBody;
use super::types::Error;

/// Uploads have a file and a few fields. A form with more parts is refused: an engine reads all of them, and the last
/// `model` counts there.
const MAX_PARTS: usize = 256;
/// The headers of a part are a name, a file's name and a type. File systems allow names of 255 bytes.
const MAX_HEAD_BYTES: usize = 8 << 10;

/// What may stand around the parts of a header.
const SPACES: [char; 2] = [' ', '\t'];

const SIGNS: Error = Error::Form("a header has signs that need quotes");
const QUOTES: Error = Error::Form("a text in quotes does not end for certain");
const BACKSLASH: Error = Error::Form("a parameter of a header has a backslash");

pub fn is_form(content_type: &str) -> bool {
    let kind = content_type.split(';').next().unwrap_or_default().trim();
    kind.eq_ignore_ascii_case("multipart/form-data")
}

/// Reads the field `model` of a form. `model_json` of the result is its bare text within the body.
pub fn peek_form<'a>(content_type: &str, body: &'a [u8]) -> Result<PeekedBody<'a>, Error> {
    let [boundary, charset] = parameters(content_type, ["boundary", "charset"])?;
    let boundary = boundary.filter(|boundary| !boundary.is_empty());
    let boundary = boundary.ok_or(Error::Form("its content type names no boundary"))?;
    let model = field(body, boundary, "model")?;
    // Some engines read names and values in the charset that is given here.
    if charset.is_some_and(|charset| !is_same_in(charset, model)) {
        return Err(Error::Form("in its charset `model` may be another one"));
    }
    Ok(PeekedBody {
        model: model.map(Cow::Borrowed),
        model_json: model,
        ..PeekedBody::default()
    })
}

/// Whether a reader that takes the form in this charset finds the same model.
fn is_same_in(charset: &str, model: Option<&str>) -> bool {
    let is_one_of = |names: &[&str]| names.iter().any(|name| charset.eq_ignore_ascii_case(name));
    // Clients in Java announce ISO 8859-1 unless they are told otherwise. ASCII is the same in all of these.
    is_one_of(&["utf-8", "utf8"])
        || is_one_of(&["iso-8859-1", "latin-1", "latin1", "us-ascii"])
            && model.is_none_or(str::is_ascii)
}

/// The value of a field. Two that differ are refused: engines do not agree on which one counts.
fn field<'a>(body: &'a [u8], boundary: &str, name: &str) -> Result<Option<&'a str>, Error> {
    let opening = format!("--{boundary}");
    let delimiter = format!("\r\n--{boundary}");
    let finder = memmem::Finder::new(&delimiter);
    let start = memmem::find(body, opening.as_bytes()).filter(|at| is_preamble(&body[..*at]));
    let start = start.ok_or(Error::Form("it does not begin with its boundary"))?;
    let mut rest = &body[start + opening.len()..];
    let mut found = None;
    for number in 0.. {
        if rest.starts_with(b"--") {
            break;
        }
        if !rest.starts_with(b"\r\n") {
            return Err(Error::Form("its boundary does not end a line"));
        }
        if number == MAX_PARTS {
            return Err(Error::Form("it has more than 256 parts"));
        }
        let end = finder
            .find(rest)
            .ok_or(Error::Form("it does not end with its boundary"))?;
        let part = &rest[..end];
        // For an engine a boundary within the headers may be one of them.
        let head_end = memmem::find(part, b"\r\n\r\n")
            .ok_or(Error::Form("the headers of a part do not end"))?;
        let (head, value) = part.split_at(head_end);
        if field_name(head)?.as_deref() == Some(name) {
            let text = str::from_utf8(&value[4..]);
            let text = text.map_err(|_| Error::Form("`model` is not text"))?;
            if found.replace(text).is_some_and(|before| before != text) {
                return Err(Error::Form("it has two fields `model` that differ"));
            }
        }
        rest = &rest[end + delimiter.len()..];
    }
    Ok(found)
}

/// Whether the first boundary may stand behind these bytes: engines skip a text before it, or its empty lines.
fn is_preamble(before: &[u8]) -> bool {
    let is_empty = before.iter().all(|byte| matches!(byte, b'\r' | b'\n'));
    is_empty || before.ends_with(b"\r\n")
}

/// The name of the field that a part with these headers is.
fn field_name(head: &[u8]) -> Result<Option<String>, Error> {
    if head.len() > MAX_HEAD_BYTES {
        return Err(Error::Form("the headers of a part take more than 8 KiB"));
    }
    // A file name may be in any encoding.
    let head = String::from_utf8_lossy(head);
    let mut found = None;
    for line in head.split("\r\n") {
        if line.starts_with(SPACES) || line.contains(['\r', '\n']) {
            return Err(Error::Form("a header of a part is not one line"));
        }
        let Some((header, value)) = line.split_once(':') else {
            continue;
        };
        if !header.trim().eq_ignore_ascii_case("content-disposition") {
            continue;
        }
        let [name] = parameters(value, ["name"])?;
        if found.replace(name).is_some() {
            return Err(Error::Form("a part has two content dispositions"));
        }
    }
    Ok(found.flatten().map(str::to_owned))
}

/// The parameters of these names in a header's value, such as `form-data; name="file"; filename="a.wav"`.
///
/// None of their values has a backslash: some readers drop one before any character, and others do so only before a
/// quote or another backslash.
fn parameters<'a, const N: usize>(
    value: &'a str,
    names: [&str; N],
) -> Result<[Option<&'a str>; N], Error> {
    let mut found = [None; N];
    let (kind, mut rest) = value.split_once(';').unwrap_or((value, ""));
    if !is_plain(kind.trim_matches(SPACES)) {
        return Err(SIGNS);
    }
    while !rest.is_empty() {
        let key_end = rest.find([';', '=']).unwrap_or(rest.len());
        let key = rest[..key_end].trim_matches(SPACES);
        let Some(after_key) = rest[key_end..].strip_prefix('=') else {
            if !key.is_empty() {
                return Err(Error::Form("a parameter of a header has no value"));
            }
            // There is nothing between two semicolons, or behind the last one.
            rest = rest.get(key_end + 1..).unwrap_or_default();
            continue;
        };
        if !is_plain(key) {
            return Err(SIGNS);
        }
        let (text, after) = parameter_value(after_key)?;
        rest = after;
        // `name*` and `name*0` say the same in another encoding, or a part of it.
        let base = key.split('*').next().unwrap_or_default();
        let sought = names
            .iter()
            .position(|name| name.eq_ignore_ascii_case(base));
        if let Some(sought) = sought {
            if base != key || found[sought].is_some() {
                return Err(Error::Form("a header gives a parameter twice or encoded"));
            }
            if text.contains('\\') {
                return Err(BACKSLASH);
            }
            found[sought] = Some(text);
        }
    }
    Ok(found)
}

/// The value of a parameter as written but for its quotes, and what stands behind the semicolon that ends it.
fn parameter_value(text: &str) -> Result<(&str, &str), Error> {
    let text = text.trim_start_matches(SPACES);
    let (value, rest) = match text.strip_prefix('"') {
        Some(inside) => quoted(inside).ok_or(QUOTES)?,
        None => {
            let (bare, rest) = text.split_at(text.find(';').unwrap_or(text.len()));
            let bare = bare.trim_end_matches(SPACES);
            if !is_plain(bare) {
                return Err(SIGNS);
            }
            (bare, rest)
        }
    };
    let rest = rest.trim_start_matches(SPACES);
    let after = rest.strip_prefix(';').or(rest.is_empty().then_some(""));
    Ok((value, after.ok_or(QUOTES)?))
}

/// Whether every reader takes a text without quotes as it is. Python's strips `<>` and some bytes that are no ASCII.
fn is_plain(text: &str) -> bool {
    let is_special = |byte: u8| matches!(byte, b'"' | b';' | b'\\' | b'<' | b'>');
    text.bytes()
        .all(|byte| byte.is_ascii_graphic() && !is_special(byte))
}

/// A text up to its closing quote, and what stands behind that. `None` if a backslash is before the quote: Python takes
/// each such quote for a part of the text, also where the backslash is escaped itself.
fn quoted(inside: &str) -> Option<(&str, &str)> {
    let mut chars = inside.char_indices();
    while let Some((at, char)) = chars.next() {
        match char {
            '"' => {
                let is_certain = !inside[..at].ends_with('\\');
                return is_certain.then_some((&inside[..at], &inside[at + 1..]));
            }
            // What it escapes ends no text.
            '\\' => _ = chars.next()?,
            _ => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TYPE: &str = "multipart/form-data; boundary=x1";
    /// `name` stands for the parameter that is sought.
    const PIECES: &[&str] = &[
        "name=",
        "name=\"",
        "\"model\"",
        "model",
        "<model>",
        "; name=model",
        "; ",
        ";",
        "x=\"",
        "\"",
        "\\",
        " ",
        "a",
        "=",
        "\u{a0}",
    ];

    fn part(head: &str, value: &str) -> String {
        format!("--x1\r\nContent-Disposition: form-data; {head}\r\n\r\n{value}\r\n")
    }

    fn check(parts: &[String], expected: Option<&str>) {
        let body = format!("{}--x1--\r\n", parts.concat());
        let peek = peek_form(TYPE, body.as_bytes()).unwrap();
        assert_eq!(peek.model.as_deref(), expected, "{body}");
        assert_eq!(peek.model_json, expected);
    }

    #[test]
    fn the_model_is_found_wherever_it_stands() {
        let file =
            "name=\"file\"; filename=\"a; name=\\\"model\\\".wav\"\r\nContent-Type: audio/wav";
        let file = part(file, "RIFF\r\n\r\nmodel\r\n-x1");
        let model = part("name=\"model\"", "whisper");
        check(&[file.clone(), model.clone()], Some("whisper"));
        check(&[model.clone(), file.clone()], Some("whisper"));
        check(&[model, part("name=model", "whisper")], Some("whisper"));
        let latin = "name=\"model\"; filename=\"\u{e9}.txt\"";
        check(&[part(latin, "a")], Some("a"));
        let encoded = "name=\"model\"; filename*=UTF-8''%e2%82%ac.txt;";
        check(&[part(encoded, "a")], Some("a"));
        check(&[file], None);
        check(&[], None);
        let body = format!("preamble\r\n{}--x1--", part("name=\"model\"", "a"));
        for content_type in [
            "Multipart/Form-Data; a=b; Boundary=\"x1\"",
            "multipart/form-data;boundary = x1 ; charset=UTF-8;",
        ] {
            let peek = peek_form(content_type, body.as_bytes());
            assert_eq!(peek.unwrap().model.as_deref(), Some("a"));
        }
    }

    #[test]
    fn no_part_hides_another_model() {
        let refused = |parts: &[String]| {
            let body = format!("{}--x1--\r\n", parts.concat());
            peek_form(TYPE, body.as_bytes()).is_err()
        };
        let model = |name: &str| part("name=\"model\"", name);
        assert!(refused(&[model("public"), model("secret")]));
        let mut many = vec![model("public")];
        many.extend((0..300).map(|number| part(&format!("name=\"f{number}\""), "x")));
        many.push(model("secret"));
        assert!(refused(&many));
        assert!(!refused(&many[..MAX_PARTS]));
        // The head of this one is no UTF-8.
        let mut body = model("public").into_bytes();
        body.extend(b"--x1\r\nContent-Disposition: form-data; filename=\"\xff\"; name=\"model\"\r\n\r\nsecret\r\n--x1--");
        assert!(peek_form(TYPE, &body).is_err());
        // Some engine finds `model` in each of these heads.
        let long = format!("{} name=\"model\"", ";".repeat(1_000_000));
        for head in [
            r#"name="x"; name="model""#,
            r#"a; name="model""#,
            "name*=utf-8''model",
            "name*0=mod; name*1=el",
            "name=<model>",
            r#"name="mo\del""#,
            r#"name="model\\""#,
            r#"filename="a\\"; y="b; name=model; z=""#,
            r#"filename="a"b; name="model""#,
            "name=\"x\"\r\nContent-Disposition: form-data; name=\"model\"",
            "name=\"x\"\nContent-Disposition: form-data; name=\"model\"",
            "filename=\"x\";\r\n name=\"model\"",
            long.as_str(),
        ] {
            assert!(
                refused(&[model("public"), part(head, "secret")]),
                "{head:.99}"
            );
        }
    }

    #[test]
    fn a_boundary_that_engines_see_elsewhere_is_refused() {
        let form = |boundary: &str, value: &str| {
            let head = "Content-Disposition: form-data; name=\"model\"";
            format!("--{boundary}\r\n{head}\r\n\r\n{value}\r\n--{boundary}--\r\n")
        };
        let refused = |content_type: &str, body: &str| {
            let refusal = peek_form(content_type, body.as_bytes()).unwrap_err();
            assert!(matches!(refusal, Error::Form(_)), "{refusal}");
        };
        let two = form("b", "secret") + &form("a", "public");
        refused("multipart/form-data; boundary=a; boundary=b", &two);
        refused("multipart/form-data; boundary=a; boundary*=utf-8''b", &two);
        refused("multipart/form-data; boundary=<a>", &form("<a>", "public"));
        // For some this is `ab`, and for others `a\b`.
        let two = form("ab", "public") + &form("a\\b", "secret");
        for boundary in [r#""a\b""#, r#""a\\b""#, r"a\b"] {
            refused(&format!("multipart/form-data; boundary={boundary}"), &two);
        }
        // In UTF-7 a field may have the name in other bytes.
        let public = form("x1", "public");
        refused("multipart/form-data; boundary=x1; charset=utf-7", &public);
        // To an engine the boundary is a header, or stands in the value.
        let head = "--x1\r\nContent-Disposition: form-data; name=\"model\"\r\n";
        refused(TYPE, &format!("{head}--x1--: b\r\n\r\nsecret\r\n{public}"));
        refused(TYPE, &format!("{head}--x1: b\r\n\r\nsecret\r\n{public}"));
        refused(
            TYPE,
            &format!("{head}\r\nsecret\r\n--x1y\r\n\r\n\r\n{public}"),
        );
        refused(TYPE, &format!("see --x1\r\n{public}"));
        // Engines skip empty lines in front, so this part counts.
        let body = format!("\n{public}");
        let peek = peek_form(TYPE, body.as_bytes()).unwrap();
        assert_eq!(peek.model.as_deref(), Some("public"));
    }

    #[test]
    fn a_charset_in_which_the_model_is_the_same_is_accepted() {
        let ascii = part("name=\"model\"", "whisper") + "--x1--";
        let other = part("name=\"model\"", "wh\u{ed}sper") + "--x1--";
        let reads = |charset: &str, body: &str| {
            let content_type = format!("{TYPE}; charset={charset}");
            peek_form(&content_type, body.as_bytes()).is_ok()
        };
        for charset in ["UTF-8", "utf8", "\"utf-8\""] {
            assert!(
                reads(charset, &ascii) && reads(charset, &other),
                "{charset}"
            );
        }
        for charset in ["ISO-8859-1", "latin-1", "latin1", "US-ASCII"] {
            assert!(
                reads(charset, &ascii) && !reads(charset, &other),
                "{charset}"
            );
        }
        for charset in ["utf-7", "utf-16", "cp037", "\"\"", "\"iso\\-8859-1\""] {
            assert!(!reads(charset, &ascii), "{charset}");
        }
    }

    #[test]
    fn a_form_that_is_cut_or_has_no_boundary_is_refused() {
        let body = part("name=\"model\"", "a");
        for content_type in ["multipart/form-data", "multipart/form-data; boundary="] {
            assert!(peek_form(content_type, body.as_bytes()).is_err());
        }
        assert!(peek_form(TYPE, b"").is_err());
        assert!(peek_form(TYPE, &body.as_bytes()[..30]).is_err());
        assert!(is_form(TYPE) && is_form("multipart/form-data"));
        assert!(!is_form("application/json") && !is_form(""));
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in proptest::collection::vec(
            proptest::sample::select(b"-x1\r\nname=\"model;: \\".to_vec()), 0..200,
        ), kind in "[a-z;= \"\\\\é]{0,30}") {
            let mut body = b"--x1".to_vec();
            body.extend(bytes);
            _ = peek_form(TYPE, &body);
            _ = peek_form(&kind, &body);
            _ = parameters(&kind, ["name"]);
        }

        #[test]
        fn python_finds_the_same_parameter_in_a_header(
            name in proptest::sample::select(&["name", "boundary", "charset"][..]),
            pieces in proptest::collection::vec(proptest::sample::select(PIECES), 0..12),
        ) {
            let header = format!("form-data; {}", pieces.concat().replace("name", name));
            if let Ok([value]) = parameters(&header, [name]) {
                prop_assert_eq!(value.unwrap_or_default(), value_for_python(&header, name), "{}", header);
            }
        }
    }

    /// The value that Python's standard library finds, with which engines read a form: the last one, of parameters that
    /// end with a semicolon before which the number of quotes without a backslash is even.
    fn value_for_python(header: &str, name: &str) -> String {
        let (mut segments, mut start) = (Vec::new(), 0);
        for (at, _) in header.match_indices(';') {
            let before = &header[start..at];
            let quotes = before.matches('"').count() - before.matches("\\\"").count();
            if quotes.is_multiple_of(2) {
                segments.push(before);
                start = at + 1;
            }
        }
        segments.push(&header[start..]);
        let parameters = segments[1..].iter().filter_map(|text| text.split_once('='));
        let mut values = parameters.filter(|(key, _)| key.trim().eq_ignore_ascii_case(name));
        let value = values.next_back().map_or("", |(_, value)| value.trim());
        let unwrapped = |first: char, last: char| value.strip_prefix(first)?.strip_suffix(last);
        match unwrapped('"', '"') {
            Some(inside) => inside.replace("\\\\", "\\").replace("\\\"", "\""),
            None => unwrapped('<', '>').unwrap_or(value).to_owned(),
        }
    }
}

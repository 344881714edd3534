//! Finds the model in a form (`multipart/form-data`), as uploads of audio are sent. Pure.

use std::borrow::Cow;

use memchr::memmem;

use super::body::PeekedBody;
use super::types::Error;

/// Uploads have a file and a few fields. A form with more parts is refused: an engine reads all of them, and the last `model`
/// counts there.
const MAX_PARTS: usize = 256;

/// True for the content type of a form.
pub fn is_form(content_type: &str) -> bool {
    let kind = content_type.split(';').next().unwrap_or_default().trim();
    kind.eq_ignore_ascii_case("multipart/form-data")
}

/// Reads the field `model` of a form. `model_json` of the result is its bare text within the body.
pub fn peek_form<'a>(content_type: &str, body: &'a [u8]) -> Result<PeekedBody<'a>, Error> {
    let boundary = parameter(content_type, "boundary").filter(|boundary| !boundary.is_empty());
    let boundary = boundary.ok_or(Error::Form("its content type names no boundary"))?;
    let model = field(body, &boundary, "model")?;
    Ok(PeekedBody {
        model: model.map(Cow::Borrowed),
        model_json: model,
        ..PeekedBody::default()
    })
}

/// The value of a field. Two that differ are refused: engines do not agree on which one counts.
fn field<'a>(body: &'a [u8], boundary: &str, name: &str) -> Result<Option<&'a str>, Error> {
    let opening = format!("--{boundary}");
    let delimiter = format!("\r\n--{boundary}");
    let finder = memmem::Finder::new(&delimiter);
    let start = if body.starts_with(opening.as_bytes()) {
        opening.len()
    } else {
        // A preamble is allowed.
        finder
            .find(body)
            .map(|at| at + delimiter.len())
            .ok_or(Error::Form("it does not begin with its boundary"))?
    };
    let mut rest = &body[start..];
    let mut found = None;
    for number in 0.. {
        if rest.starts_with(b"--") {
            break;
        }
        if number == MAX_PARTS {
            return Err(Error::Form("it has more than 256 parts"));
        }
        let end = finder
            .find(rest)
            .ok_or(Error::Form("it does not end with its boundary"))?;
        let part = &rest[..end];
        if let Some(at) = memmem::find(part, b"\r\n\r\n") {
            let (head, value) = part.split_at(at);
            if is_named(head, name) {
                let text = str::from_utf8(&value[4..]);
                let text = text.map_err(|_| Error::Form("`model` is not text"))?;
                if found.replace(text).is_some_and(|before| before != text) {
                    return Err(Error::Form("it has two fields `model` that differ"));
                }
            }
        }
        rest = &rest[end + delimiter.len()..];
    }
    Ok(found)
}

/// Whether the headers of a part are those of this field.
fn is_named(head: &[u8], name: &str) -> bool {
    // A file name may be in any encoding.
    let head = String::from_utf8_lossy(head);
    let dispositions = head.split("\r\n").filter_map(|line| {
        let (header, value) = line.split_once(':')?;
        let is_it = header.trim().eq_ignore_ascii_case("content-disposition");
        is_it.then_some(value)
    });
    let mut names = dispositions.filter_map(|value| parameter(value, "name"));
    names.any(|found| found == name)
}

/// A parameter of a header's value: a token, or a text in quotes.
fn parameter(value: &str, name: &str) -> Option<String> {
    let mut rest = value;
    loop {
        let at = rest.find([';', '"'])?;
        if rest.as_bytes()[at] == b'"' {
            let (_, after) = quoted(&rest[at + 1..])?;
            rest = after;
            continue;
        }
        rest = rest[at + 1..].trim_start();
        let Some((key, after)) = rest.split_once('=') else {
            continue;
        };
        let is_it = key.trim().eq_ignore_ascii_case(name);
        let after = after.trim_start();
        if !is_it {
            rest = after;
            continue;
        }
        return match after.strip_prefix('"') {
            Some(inside) => quoted(inside).map(|(text, _)| text),
            None => {
                let end = after.find(';').unwrap_or(after.len());
                Some(after[..end].trim().to_owned())
            }
        };
    }
}

/// A text up to its closing quote, and what stands behind that.
fn quoted(inside: &str) -> Option<(String, &str)> {
    let mut text = String::new();
    let mut chars = inside.char_indices();
    while let Some((at, char)) = chars.next() {
        match char {
            '"' => return Some((text, &inside[at + 1..])),
            '\\' => text.push(chars.next()?.1),
            char => text.push(char),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TYPE: &str = "multipart/form-data; boundary=x1";

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
        check(&[file], None);
        check(&[], None);
        let body = format!("preamble\r\n{}--x1--", part("name=\"model\"", "a"));
        let peek = peek_form("Multipart/Form-Data; a=b; Boundary=\"x1\"", body.as_bytes());
        assert_eq!(peek.unwrap().model.as_deref(), Some("a"));
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
            _ = parameter(&kind, "name");
        }
    }
}

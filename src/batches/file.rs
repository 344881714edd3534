//! The record of a file: what the store keeps of it, and how clients see it. Pure.
//!
//! A file's name is what a client called it, and no path is ever made of it: bytes lie under the id, which the router
//! makes.

use std::time::Duration;

use bytes::Bytes;
use hyper::header::HeaderValue;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde::{Deserialize, Serialize};

use crate::ids::{self, Tenant};
use crate::observe::metrics::words;
use crate::store::documents::{Collection, DocumentKey};

const ID_PREFIX: &str = "file-";
const ID_DIGITS: usize = 24;
/// What file systems take.
const NAME_BYTES_MAX: usize = 255;
/// For a file that a client gave no name.
const NO_NAME: &str = "file";

/// A file or batch whose creation is not confirmed so long after its start is deleted. The storage completes a large
/// object in minutes.
pub const UNCONFIRMED_LIMIT: Duration = Duration::from_secs(3_600);

words! {
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum FilePurpose {
        /// The input of batches.
        Batch = "batch",
        /// Results and errors of a batch.
        BatchOutput = "batch_output",
    }
}

/// A file, as the store keeps it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileRecord {
    pub id: String,
    pub bytes: u64,
    /// Seconds since 1970.
    pub created_at: i64,
    /// Seconds since 1970. From then on the file is not found. `None`: never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<i64>,
    pub filename: String,
    pub purpose: FilePurpose,
}

/// OpenAI's `File`.
#[derive(Debug, Serialize)]
struct FileObject<'a> {
    object: &'static str,
    status: &'static str,
    status_details: Option<&'static str>,
    #[serde(flatten)]
    record: &'a FileRecord,
}

/// OpenAI's list of files.
#[derive(Debug, Serialize)]
struct FileList<'a> {
    object: &'static str,
    data: Vec<FileObject<'a>>,
    first_id: Option<&'a str>,
    last_id: Option<&'a str>,
    has_more: bool,
}

impl FileRecord {
    pub fn from_json(json: &[u8]) -> serde_json::Result<Self> {
        serde_json::from_slice(json)
    }

    pub fn to_json(&self) -> Bytes {
        // Numbers and texts always serialize.
        serde_json::to_vec(self).unwrap_or_default().into()
    }

    /// What clients get.
    pub fn object(&self) -> Bytes {
        serde_json::to_vec(&self.file_object())
            .unwrap_or_default()
            .into()
    }

    fn file_object(&self) -> FileObject<'_> {
        FileObject {
            object: "file",
            status: "processed",
            status_details: None,
            record: self,
        }
    }

    /// As it is written before its bytes are there. No client finds it: it has expired.
    #[must_use]
    pub fn unconfirmed(&self) -> Self {
        Self {
            expires_at: Some(0),
            ..self.clone()
        }
    }

    pub fn is_expired(&self, now_s: i64) -> bool {
        self.expires_at.is_some_and(|at| at <= now_s)
    }

    /// When it is to be deleted.
    pub fn due_ms(&self) -> Option<u64> {
        let at = u64::try_from(self.expires_at?).unwrap_or_default();
        Some(at.saturating_mul(1_000))
    }

    pub fn created_ms(&self) -> u64 {
        let at = u64::try_from(self.created_at).unwrap_or_default();
        at.saturating_mul(1_000)
    }
}

pub fn list_object(records: &[FileRecord], has_more: bool) -> Bytes {
    let list = FileList {
        object: "list",
        data: records.iter().map(FileRecord::file_object).collect(),
        first_id: records.first().map(|record| record.id.as_str()),
        last_id: records.last().map(|record| record.id.as_str()),
        has_more,
    };
    serde_json::to_vec(&list).unwrap_or_default().into()
}

/// What a client gets that has deleted a file.
pub fn deleted_object(id: &str) -> Bytes {
    let object = serde_json::json!({"id": id, "object": "file", "deleted": true});
    object.to_string().into()
}

/// `file-` and 24 hex digits of `random`.
pub fn new_file_id(random: u128) -> String {
    let digits = ids::hex::<ID_DIGITS>(&random.to_be_bytes());
    let digits = str::from_utf8(&digits).unwrap_or_default();
    format!("{ID_PREFIX}{digits}")
}

/// Whether a text is an id that [`new_file_id`] could have made. Any other text is no part of a path or a key.
pub fn is_file_id(text: &str) -> bool {
    text.strip_prefix(ID_PREFIX)
        .is_some_and(|digits| ids::is_hex(digits, ID_DIGITS))
}

/// Where the bytes of a file lie. `None` if `id` is no id of a file.
pub fn storage_path(tenant: Tenant, id: &str) -> Option<String> {
    is_file_id(id).then(|| format!("files/{tenant}/{id}"))
}

/// The key of a file's record. `None` if `id` is no id of a file.
pub fn document_key(tenant: Tenant, id: &str) -> Option<DocumentKey> {
    is_file_id(id).then(|| DocumentKey::new(Collection::Files, tenant, id))
}

/// A name as a record has it: what a client sent, without control characters and not longer than file systems take.
pub fn clean_name(given: Option<&str>) -> String {
    let mut name = String::new();
    for sign in given.unwrap_or_default().chars() {
        if name.len() + sign.len_utf8() > NAME_BYTES_MAX {
            break;
        }
        if !sign.is_control() {
            name.push(sign);
        }
    }
    if name.is_empty() {
        return NO_NAME.to_owned();
    }
    name
}

/// The value of `content-disposition` by which a client saves a file under its name (RFC 6266).
pub fn content_disposition(name: &str) -> HeaderValue {
    let is_plain =
        |sign: char| sign == ' ' || sign.is_ascii_graphic() && !matches!(sign, '"' | '\\' | '%');
    let plain = |sign: char| if is_plain(sign) { sign } else { '_' };
    let ascii: String = name.chars().map(plain).collect();
    let mut value = format!("attachment; filename=\"{ascii}\"");
    if ascii != name {
        let encoded = utf8_percent_encode(name, NON_ALPHANUMERIC);
        value.push_str(&format!("; filename*=UTF-8''{encoded}"));
    }
    HeaderValue::from_str(&value).unwrap_or(HeaderValue::from_static("attachment"))
}

/// What the bytes of a file are, by its name.
pub fn content_type(name: &str) -> HeaderValue {
    HeaderValue::from_static(if name.ends_with(".jsonl") {
        "application/jsonl"
    } else {
        "application/octet-stream"
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    fn record() -> FileRecord {
        FileRecord {
            id: new_file_id(7),
            bytes: 120_000,
            created_at: 1_677_610_602,
            expires_at: Some(1_680_202_602),
            filename: "in.jsonl".to_owned(),
            purpose: FilePurpose::Batch,
        }
    }

    #[test]
    fn a_client_gets_openais_object() {
        let object: Value = serde_json::from_slice(&record().object()).unwrap();
        let expected = json!({
            "id": "file-000000000000000000000000",
            "object": "file",
            "bytes": 120_000,
            "created_at": 1_677_610_602,
            "expires_at": 1_680_202_602,
            "filename": "in.jsonl",
            "purpose": "batch",
            "status": "processed",
            "status_details": null,
        });
        assert_eq!(object, expected);
    }

    #[test]
    fn a_list_names_its_first_and_last_file() {
        let list = |records: &[FileRecord], has_more| -> Value {
            serde_json::from_slice(&list_object(records, has_more)).unwrap()
        };
        let empty = json!({"object": "list", "data": [], "first_id": null, "last_id": null, "has_more": false});
        assert_eq!(list(&[], false), empty);
        let mut other = record();
        other.id = new_file_id(u128::MAX);
        let two = list(&[record(), other.clone()], true);
        assert_eq!(
            (&two["first_id"], &two["last_id"], &two["has_more"]),
            (&json!(record().id), &json!(other.id), &json!(true))
        );
        assert_eq!(two["data"][1]["id"], other.id);
    }

    #[test]
    fn a_record_is_read_back_also_by_another_release() {
        assert_eq!(
            FileRecord::from_json(&record().to_json()).unwrap(),
            record()
        );
        let newer = json!({
            "id": "file-1", "bytes": 1, "created_at": 2, "filename": "a", "purpose": "batch_output", "colour": "red"
        });
        let read = FileRecord::from_json(newer.to_string().as_bytes()).unwrap();
        assert_eq!((read.expires_at, read.due_ms()), (None, None));
        assert_eq!(read.purpose.as_str(), "batch_output");
        assert!(FileRecord::from_json(b"null").is_err());
    }

    #[test]
    fn a_file_expires_at_its_second() {
        let record = record();
        assert!(!record.is_expired(1_680_202_601));
        assert!(record.is_expired(1_680_202_602));
        assert_eq!(record.due_ms(), Some(1_680_202_602_000));
    }

    #[test]
    fn only_an_id_of_this_router_becomes_a_path() {
        let tenant = Tenant::of("a");
        let id = new_file_id(u128::MAX);
        assert_eq!(id, "file-ffffffffffffffffffffffff");
        assert_eq!(
            storage_path(tenant, &id),
            Some(format!("files/{tenant}/{id}"))
        );
        for wrong in [
            "",
            "file-",
            "../../etc/passwd",
            "file-../../../../etc/passwd",
            "file-fffffffffffffffffffffff",
            "file-fffffffffffffffffffffffff",
            "file-FFFFFFFFFFFFFFFFFFFFFFFF",
            "file-ffffffffffffffffffffff/f",
            "batch-ffffffffffffffffffffffff",
        ] {
            assert_eq!(storage_path(tenant, wrong), None, "{wrong}");
            assert_eq!(document_key(tenant, wrong), None, "{wrong}");
        }
    }

    #[test]
    fn two_ids_differ() {
        let ids: BTreeSet<String> = (0..1_000_u128)
            .map(|random| new_file_id(random << 64))
            .collect();
        assert_eq!(ids.len(), 1_000);
        assert!(ids.iter().all(|id| is_file_id(id)));
    }

    #[test]
    fn a_name_is_kept_as_data_and_never_breaks_a_header() {
        let check = |name: &str, expected: &str| {
            assert_eq!(content_disposition(name), expected, "{name}");
        };
        check("in.jsonl", "attachment; filename=\"in.jsonl\"");
        check(
            "a\"b.jsonl",
            "attachment; filename=\"a_b.jsonl\"; filename*=UTF-8''a%22b%2Ejsonl",
        );
        check("é", "attachment; filename=\"_\"; filename*=UTF-8''%C3%A9");
        assert_eq!(clean_name(Some("a\r\nb: c")), "ab: c");
        assert_eq!(clean_name(Some("../a/b")), "../a/b");
        assert_eq!(clean_name(None), "file");
        assert_eq!(clean_name(Some("\n")), "file");
        assert_eq!(clean_name(Some(&"é".repeat(200))).len(), 254);
        assert_eq!(content_type("a.jsonl"), "application/jsonl");
        assert_eq!(content_type("a"), "application/octet-stream");
    }

    proptest! {
        #[test]
        fn any_name_makes_a_header(name in "\\PC*") {
            let value = content_disposition(&clean_name(Some(&name)));
            prop_assert!(value.to_str().unwrap().starts_with("attachment; filename="));
        }
    }
}

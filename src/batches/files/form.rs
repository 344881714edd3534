//! The fields of an upload beside its file. Pure.

use crate::batches::file::FilePurpose;
use crate::openai::error::ApiError;

pub(super) const FILE: &str = "file";
const PURPOSE: &str = "purpose";
const ANCHOR: &str = "expires_after[anchor]";
const SECONDS: &str = "expires_after[seconds]";
/// OpenAI's: an hour, and 30 days.
const MIN_SECONDS: u64 = 3_600;
const MAX_SECONDS: u64 = 2_592_000;

/// Bytes of a field. The longest value that is accepted has ten.
pub(super) const MAX_FIELD_BYTES: usize = 1_024;

#[derive(Debug, Default)]
pub(super) struct FormFields {
    purpose: Option<FilePurpose>,
    has_anchor: bool,
    seconds: Option<u64>,
}

/// What a whole form says.
#[derive(Debug, PartialEq)]
pub(super) struct FileRequest {
    pub(super) purpose: FilePurpose,
    /// Seconds after which the file expires, if its client asked for that.
    pub(super) expires_after: Option<u64>,
}

impl FormFields {
    /// Refuses a field that is none of the form, before its value is read.
    pub(super) fn check_name(&self, name: &str) -> Result<(), ApiError> {
        let is_repeated = match name {
            PURPOSE => self.purpose.is_some(),
            ANCHOR => self.has_anchor,
            SECONDS => self.seconds.is_some(),
            _ => return Err(ApiError::unknown_parameter(name)),
        };
        if is_repeated {
            return Err(ApiError::repeated_parameter(name));
        }
        Ok(())
    }

    pub(super) fn add(&mut self, name: &str, value: &[u8]) -> Result<(), ApiError> {
        self.check_name(name)?;
        let value = str::from_utf8(value).map_err(|_| ApiError::wrong_type(name, "a text"))?;
        match name {
            PURPOSE => {
                // Clients upload nothing else.
                if value != FilePurpose::Batch.as_str() {
                    return Err(ApiError::unsupported_purpose(value));
                }
                self.purpose = Some(FilePurpose::Batch);
            }
            ANCHOR => {
                if value != "created_at" {
                    return Err(ApiError::wrong_value(name, "it must be 'created_at'"));
                }
                self.has_anchor = true;
            }
            // The only other name: `SECONDS`.
            _ => {
                let is_number = value.bytes().all(|digit| digit.is_ascii_digit());
                let seconds = is_number.then(|| value.parse::<u64>().ok()).flatten();
                let seconds =
                    seconds.filter(|seconds| (MIN_SECONDS..=MAX_SECONDS).contains(seconds));
                let seconds = seconds.ok_or_else(|| {
                    let why = format!("it must be from {MIN_SECONDS} to {MAX_SECONDS}");
                    ApiError::wrong_value(name, why)
                })?;
                self.seconds = Some(seconds);
            }
        }
        Ok(())
    }

    /// What the fields say at the form's end. `file_bytes`: the size of the file, if there was one.
    pub(super) fn end(&self, file_bytes: Option<u64>) -> Result<FileRequest, ApiError> {
        let purpose = self.purpose;
        let purpose = purpose.ok_or_else(|| ApiError::missing_parameter(PURPOSE))?;
        match file_bytes {
            None => return Err(ApiError::missing_parameter(FILE)),
            Some(0) => return Err(ApiError::empty_file()),
            Some(_) => {}
        }
        match (self.has_anchor, self.seconds) {
            (true, None) => return Err(ApiError::missing_parameter(SECONDS)),
            (false, Some(_)) => return Err(ApiError::missing_parameter(ANCHOR)),
            (true, Some(_)) | (false, None) => {}
        }
        Ok(FileRequest {
            purpose,
            expires_after: self.seconds,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(fields: &[(&str, &str)], file_bytes: Option<u64>) -> Result<FileRequest, ApiError> {
        let mut form = FormFields::default();
        for (name, value) in fields {
            form.add(name, value.as_bytes())?;
        }
        form.end(file_bytes)
    }

    #[test]
    fn a_form_says_what_the_file_is_for_and_how_long_it_stays() {
        let purpose = FilePurpose::Batch;
        let plain = FileRequest {
            purpose,
            expires_after: None,
        };
        assert_eq!(read(&[("purpose", "batch")], Some(1)).unwrap(), plain);
        for seconds in [MIN_SECONDS, MAX_SECONDS] {
            let text = seconds.to_string();
            let fields = [
                (SECONDS, &*text),
                ("purpose", "batch"),
                (ANCHOR, "created_at"),
            ];
            let expected = FileRequest {
                purpose,
                expires_after: Some(seconds),
            };
            assert_eq!(read(&fields, Some(1)).unwrap(), expected);
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        let check = |fields: &[(&str, &str)], bytes, code: &str, param: &str| {
            let error = read(fields, bytes).unwrap_err();
            assert_eq!(
                (error.code, error.param_or_empty()),
                (code, param),
                "{fields:?}"
            );
            assert_eq!(error.status, 400);
        };
        let purpose = ("purpose", "batch");
        let missing = "missing_required_parameter";
        check(&[], Some(1), missing, "purpose");
        check(&[purpose], None, missing, "file");
        check(&[purpose], Some(0), "empty_file", "file");
        check(
            &[purpose, (ANCHOR, "created_at")],
            Some(1),
            missing,
            SECONDS,
        );
        check(&[purpose, (SECONDS, "3600")], Some(1), missing, ANCHOR);
        check(
            &[("purpose", "fine-tune")],
            Some(1),
            "invalid_value",
            "purpose",
        );
        check(&[(ANCHOR, "now")], Some(1), "invalid_value", ANCHOR);
        for seconds in ["3599", "2592001", "", "1e4", "-1", "+3600", " 3600"] {
            check(&[(SECONDS, seconds)], Some(1), "invalid_value", SECONDS);
        }
        check(&[("model", "m")], Some(1), "unknown_parameter", "model");
        check(
            &[purpose, purpose],
            Some(1),
            "duplicate_parameter",
            "purpose",
        );
    }

    #[test]
    fn a_purpose_that_is_not_supported_is_answered_with_those_that_are() {
        let error = read(&[("purpose", "vision")], Some(1)).unwrap_err();
        let expected = "Invalid value: 'vision'. Supported values are: 'batch'.";
        assert_eq!(error.message, expected);
    }
}

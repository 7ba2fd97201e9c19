//! Byte strings: paths, environment values and output are bytes on Unix, and JSON has only text.
//!
//! In JSON a [`ByteString`] is a plain string when it is valid UTF-8 and `{"base64": "…"}` otherwise, so nothing is ever lost.
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::de::{self, MapAccess, Visitor};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::codec::{Decode, Encode};

/// Bytes that are usually, but not always, UTF-8.
#[derive(Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Encode, Decode)]
pub struct ByteString(pub Vec<u8>);

impl ByteString {
    /// The bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// The bytes as a path.
    #[must_use]
    pub fn as_path(&self) -> &Path {
        Path::new(OsStr::from_bytes(&self.0))
    }

    /// The bytes as an owned path.
    #[must_use]
    pub fn to_path_buf(&self) -> PathBuf {
        self.as_path().to_path_buf()
    }

    /// The bytes as an operating-system string.
    #[must_use]
    pub fn as_os_str(&self) -> &OsStr {
        OsStr::from_bytes(&self.0)
    }

    /// Text for people: invalid UTF-8 is replaced visibly.
    #[must_use]
    pub fn display(&self) -> String {
        String::from_utf8_lossy(&self.0).into_owned()
    }
}

impl fmt::Debug for ByteString {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.display())
    }
}

impl From<&str> for ByteString {
    fn from(text: &str) -> Self {
        Self(text.as_bytes().to_vec())
    }
}
impl From<String> for ByteString {
    fn from(text: String) -> Self {
        Self(text.into_bytes())
    }
}
impl From<Vec<u8>> for ByteString {
    fn from(bytes: Vec<u8>) -> Self {
        Self(bytes)
    }
}
impl From<&[u8]> for ByteString {
    fn from(bytes: &[u8]) -> Self {
        Self(bytes.to_vec())
    }
}
impl From<&Path> for ByteString {
    fn from(path: &Path) -> Self {
        Self(path.as_os_str().as_bytes().to_vec())
    }
}
impl From<PathBuf> for ByteString {
    fn from(path: PathBuf) -> Self {
        Self(path.into_os_string().into_vec())
    }
}
impl From<OsString> for ByteString {
    fn from(text: OsString) -> Self {
        Self(text.into_vec())
    }
}
impl From<&OsStr> for ByteString {
    fn from(text: &OsStr) -> Self {
        Self(text.as_bytes().to_vec())
    }
}

impl Serialize for ByteString {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if let Ok(text) = std::str::from_utf8(&self.0) {
            return serializer.serialize_str(text);
        }
        let mut map = serializer.serialize_map(Some(1))?;
        map.serialize_entry("base64", &STANDARD.encode(&self.0))?;
        map.end()
    }
}

impl<'de> Deserialize<'de> for ByteString {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ByteStringVisitor)
    }
}

/// Text, or an object with `base64`.
#[cfg(feature = "schema")]
impl schemars::JsonSchema for ByteString {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "ByteString".into()
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({
            "description": "Bytes: a string when they are valid UTF-8, an object otherwise.",
            "oneOf": [
                {"type": "string"},
                {"type": "object", "properties": {"base64": {"type": "string"}}, "required": ["base64"], "additionalProperties": false},
            ],
        })
    }
}

/// Maps whose names are bytes. JSON has only text for names, so one that is not UTF-8 is written `base64:…` (and so is one that begins like that).
pub(crate) mod named {
    use std::collections::BTreeMap;

    use base64::Engine as _;

    use super::{ByteString, Deserialize, Deserializer, STANDARD, Serialize, Serializer, de};

    const ENCODED: &str = "base64:";

    pub(crate) fn serialize<S: Serializer>(
        map: &Option<BTreeMap<ByteString, ByteString>>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        map.as_ref()
            .map(|map| {
                map.iter()
                    .map(|(name, value)| (to_text(name), value))
                    .collect::<BTreeMap<_, _>>()
            })
            .serialize(serializer)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<BTreeMap<ByteString, ByteString>>, D::Error> {
        let map = Option::<BTreeMap<String, ByteString>>::deserialize(deserializer)?;
        map.map(|map| {
            map.into_iter()
                .map(|(name, value)| Ok((from_text(&name)?, value)))
                .collect()
        })
        .transpose()
    }

    fn to_text(name: &ByteString) -> String {
        match std::str::from_utf8(&name.0) {
            Ok(text) if !text.starts_with(ENCODED) => text.to_owned(),
            _ => format!("{ENCODED}{}", STANDARD.encode(&name.0)),
        }
    }

    fn from_text<E: de::Error>(text: &str) -> Result<ByteString, E> {
        let Some(encoded) = text.strip_prefix(ENCODED) else {
            return Ok(text.into());
        };
        STANDARD
            .decode(encoded)
            .map(ByteString)
            .map_err(|error| de::Error::custom(format!("invalid base64: {error}")))
    }
}

struct ByteStringVisitor;

impl<'de> Visitor<'de> for ByteStringVisitor {
    type Value = ByteString;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string, or {\"base64\": \"…\"} for bytes that are not UTF-8")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<ByteString, E> {
        Ok(ByteString::from(text))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<ByteString, A::Error> {
        let Some((key, value)) = map.next_entry::<String, String>()? else {
            return Err(de::Error::custom("expected the key `base64`"));
        };
        if key != "base64" || map.next_key::<String>()?.is_some() {
            return Err(de::Error::custom("expected exactly the key `base64`"));
        }
        STANDARD
            .decode(value)
            .map(ByteString)
            .map_err(|error| de::Error::custom(format!("invalid base64: {error}")))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn text_is_a_plain_string_in_json_and_other_bytes_are_base64() {
        assert_eq!(serde_json::to_string(&ByteString::from("a/ü")).unwrap(), "\"a/ü\"");
        let raw = ByteString(vec![0xff, b'a']);
        let json = serde_json::to_string(&raw).unwrap();
        assert_eq!(json, r#"{"base64":"/2E="}"#);
        assert_eq!(serde_json::from_str::<ByteString>(&json).unwrap(), raw);
    }

    #[test]
    fn another_key_or_bad_base64_is_refused() {
        for json in [
            r#"{"b64":"aa"}"#,
            r#"{"base64":"*"}"#,
            r#"{"base64":"/2E=","x":"y"}"#,
            "{}",
            "3",
        ] {
            assert!(serde_json::from_str::<ByteString>(json).is_err(), "{json}");
        }
    }
}

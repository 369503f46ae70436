//! Paths in JSON, which has only text.
//!
//! ```text
//!   UTF-8       "volume": "/srv/é.img"
//!   other       "volume": "/srv/\\xff.img", "volume_hex": "2f7372762fff2e696d67"
//! ```
//! A member is a path, a list of paths, or an optional path, which is left out. Programs that know
//! no `_hex` read and write what is UTF-8 as before.
//!
//! Use: `#[serde(flatten, with = "path_members::volume")]`.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use draconis_types::path_bytes::{ShowPath, format_hex, parse_hex};
use serde::de::{DeserializeOwned, Error};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A value that consists of paths.
pub trait Paths: Sized {
    /// The same with a text for each path.
    type Text: Serialize + DeserializeOwned;

    /// Returns the texts; `None` for an absent value.
    fn to_text(&self, text_of: fn(&Path) -> String) -> Option<Self::Text>;

    /// Parses the texts; `None` if one has no path, or a required value is absent.
    fn from_text(text: Option<Self::Text>, path_of: fn(String) -> Option<PathBuf>) -> Option<Self>;

    /// Returns true if every path is UTF-8.
    fn is_utf8(&self) -> bool;
}

impl Paths for PathBuf {
    type Text = String;

    fn to_text(&self, text_of: fn(&Path) -> String) -> Option<String> {
        Some(text_of(self))
    }

    fn from_text(text: Option<String>, path_of: fn(String) -> Option<PathBuf>) -> Option<Self> {
        path_of(text?)
    }

    fn is_utf8(&self) -> bool {
        self.to_str().is_some()
    }
}

impl Paths for Option<PathBuf> {
    type Text = String;

    fn to_text(&self, text_of: fn(&Path) -> String) -> Option<String> {
        self.as_deref().map(text_of)
    }

    fn from_text(text: Option<String>, path_of: fn(String) -> Option<PathBuf>) -> Option<Self> {
        match text {
            None => Some(None),
            Some(text) => path_of(text).map(Some),
        }
    }

    fn is_utf8(&self) -> bool {
        self.as_ref().is_none_or(Paths::is_utf8)
    }
}

impl Paths for Vec<PathBuf> {
    type Text = Vec<String>;

    fn to_text(&self, text_of: fn(&Path) -> String) -> Option<Vec<String>> {
        Some(self.iter().map(|path| text_of(path)).collect())
    }

    fn from_text(
        text: Option<Vec<String>>,
        path_of: fn(String) -> Option<PathBuf>,
    ) -> Option<Self> {
        text.unwrap_or_default().into_iter().map(path_of).collect()
    }

    fn is_utf8(&self) -> bool {
        self.iter().all(Paths::is_utf8)
    }
}

/// Writes paths through `members`, which gets the texts and, if needed, those in hexadecimal.
fn to_members<P: Paths, R>(
    paths: &P,
    members: impl FnOnce(Option<P::Text>, Option<P::Text>) -> R,
) -> R {
    let hex = (!paths.is_utf8()).then(|| paths.to_text(|it| format_hex(it.as_os_str().as_bytes())));
    members(paths.to_text(|path| path.shown().to_string()), hex.flatten())
}

fn from_members<P: Paths, E: Error>(
    text: Option<P::Text>,
    hex: Option<P::Text>,
    name: &'static str,
) -> Result<P, E> {
    let from_hex = |text: String| Some(OsString::from_vec(parse_hex(text.as_bytes())?).into());
    let paths = match hex {
        Some(hex) => P::from_text(Some(hex), from_hex),
        None => P::from_text(text, |text| Some(text.into())),
    };
    paths.ok_or_else(|| E::custom(format_args!("no path in `{name}`")))
}

macro_rules! path_members {
    ($($name:ident $text:literal $hex:literal)*) => {$(
        #[doc = concat!("The members `", $text, "` and `", $hex, "`.")]
        pub mod $name {
            use super::*;

            #[derive(Serialize, Deserialize)]
            struct Members<T> {
                #[serde(rename = $text, skip_serializing_if = "Option::is_none")]
                text: Option<T>,
                #[serde(rename = $hex, skip_serializing_if = "Option::is_none")]
                hex: Option<T>,
            }

            /// Writes the members.
            ///
            /// # Errors
            /// Those of the serializer.
            pub fn serialize<P: Paths, S: Serializer>(
                paths: &P,
                into: S,
            ) -> Result<S::Ok, S::Error> {
                to_members(paths, |text, hex| Members { text, hex }.serialize(into))
            }

            /// Reads the members.
            ///
            /// # Errors
            /// Those of the deserializer; if a path is absent, or is no hexadecimal.
            pub fn deserialize<'de, P: Paths, D: Deserializer<'de>>(
                from: D,
            ) -> Result<P, D::Error> {
                let Members { text, hex } = Members::deserialize(from)?;
                from_members(text, hex, $text)
            }
        }
    )*};
}

path_members! {
    backing "backing" "backing_hex"
    file "file" "file_hex"
    image "image" "image_hex"
    list "list" "list_hex"
    mount_point "mount_point" "mount_point_hex"
    parts "parts" "parts_hex"
    place "place" "place_hex"
    program "program" "program_hex"
    source "source" "source_hex"
    vhost_user_socket "vhost_user_socket" "vhost_user_socket_hex"
    volume "volume" "volume_hex"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    enum Message {
        Mount {
            #[serde(flatten, with = "volume")]
            image: PathBuf,
            #[serde(flatten, with = "place")]
            place: Option<PathBuf>,
            #[serde(flatten, with = "parts")]
            parts: Vec<PathBuf>,
            count: u64,
        },
    }

    fn path(bytes: &[u8]) -> PathBuf {
        OsString::from_vec(bytes.to_vec()).into()
    }

    fn round_trip(message: &Message, text: &str) {
        assert_eq!(serde_json::to_string(message).unwrap(), text);
        assert_eq!(&serde_json::from_str::<Message>(text).unwrap(), message);
    }

    #[test]
    fn paths_round_trip_and_older_programs_read_utf8() {
        let message = Message::Mount {
            image: path("/é".as_bytes()),
            place: None,
            parts: vec![path(b"a")],
            count: u64::MAX,
        };
        let text = r#"{"Mount":{"volume":"/é","parts":["a"],"count":18446744073709551615}}"#;
        round_trip(&message, text);
        let message = Message::Mount {
            image: path(b"/\xff"),
            place: Some(path(b"\\xff")),
            parts: vec![path(b"a"), path(b"\xc3")],
            count: 0,
        };
        round_trip(
            &message,
            r#"{"Mount":{"volume":"/\\xff","volume_hex":"2fff","place":"\\xff","parts":["a","\\xc3"],"parts_hex":["61","c3"],"count":0}}"#,
        );
    }

    #[test]
    fn absent_and_malformed_paths_are_errors() {
        let parse = |text: &str| {
            serde_json::from_str::<Message>(&format!("{{\"Mount\":{{\"count\":1,{text}}}}}"))
        };
        assert!(parse(r#""volume":"a""#).is_ok() && parse(r#""volume":"a","place":null"#).is_ok());
        for text in [r#""place":"a""#, r#""volume":null"#, r#""volume":"a","volume_hex":"f""#] {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains("no path in `volume`"), "{error}");
        }
        assert!(parse(r#""volume":"a","parts":["b"],"parts_hex":["zz"]"#).is_err());
        assert!(parse(r#""volume":["a"]"#).is_err());
    }
}

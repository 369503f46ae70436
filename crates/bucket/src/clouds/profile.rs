//! Profiles of AWS users: `~/.aws/config` and `~/.aws/credentials`.
//!
//! ```text
//!   [profile NAME]            config; [NAME] in credentials, whose settings count more
//!   region = eu-west-1
//!   services = local
//!   [services local]
//!   s3 =
//!     endpoint_url = http://localhost:9000
//! ```
//!
//! Law 1: a missing file is empty; an invalid one is reported, with its line.

use std::collections::BTreeMap;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

use draconis_types::path_bytes::ShowPath;

/// Environment variables that are not empty.
pub(super) type Environment = BTreeMap<String, String>;
/// Settings by name. A nested setting is called `s3.endpoint_url`.
type Settings = BTreeMap<String, String>;
type Sections = BTreeMap<String, Settings>;

/// Longest file of settings, in bytes.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// The selected profile.
#[derive(Clone, Default, Debug)]
pub(super) struct Profile {
    pub name: String,
    settings: Settings,
    /// Settings of single services, from the section that the profile names.
    services: Settings,
}

impl Profile {
    /// Reads the profile that `AWS_PROFILE` names, or `default`, from both files.
    ///
    /// # Errors
    /// Which file cannot be read or parsed, or that no file has the profile that is named.
    pub fn read(environment: &Environment) -> Result<Self, String> {
        let named = environment.get("AWS_PROFILE").or(environment.get("AWS_DEFAULT_PROFILE"));
        let name = named.map_or("default", String::as_str).to_owned();
        let [credentials, config] = config_paths(environment);
        let mut all = read_file(config.as_deref())?;
        let mut keys = read_file(credentials.as_deref())?;
        let mut settings = all.remove(&format!("profile {name}"));
        if name == "default" {
            settings = settings.or_else(|| all.remove(&name));
        }
        let keys = keys.remove(&name);
        if named.is_some() && settings.is_none() && keys.is_none() {
            let [credentials, config] =
                [credentials, config].map(|path| display_path(path.as_deref()));
            return Err(format!(
                "no profile '{name}' (AWS_PROFILE) is in {credentials} or {config}"
            ));
        }
        let mut settings = settings.unwrap_or_default();
        settings.extend(keys.unwrap_or_default());
        let services = settings.get("services").map(|name| format!("services {name}"));
        let services = services.and_then(|section| all.remove(&section)).unwrap_or_default();
        Ok(Self { name, settings, services })
    }

    /// Returns the value of a setting.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.settings.get(name).map(String::as_str).filter(|value| !value.is_empty())
    }

    /// Returns the endpoint of a service, if the profile has one.
    pub fn endpoint(&self, service: &str) -> Option<&str> {
        let name = format!("{service}.endpoint_url");
        self.services.get(&name).map(String::as_str).or_else(|| self.get("endpoint_url"))
    }
}

/// Returns the files of credentials and of settings; none without a home directory.
pub(super) fn config_paths(environment: &Environment) -> [Option<PathBuf>; 2] {
    let home = environment.get("HOME").map(Path::new);
    let file = |variable: &str, name: &str| match environment.get(variable) {
        Some(path) => match (path.strip_prefix("~/"), home) {
            (Some(rest), Some(home)) => Some(home.join(rest)),
            _ => Some(PathBuf::from(path)),
        },
        None => home.map(|home| home.join(".aws").join(name)),
    };
    [file("AWS_SHARED_CREDENTIALS_FILE", "credentials"), file("AWS_CONFIG_FILE", "config")]
}

/// Returns a path for a message.
pub(super) fn display_path(path: Option<&Path>) -> String {
    path.map_or("~/.aws (HOME is not set)".to_owned(), |path| path.shown().to_string())
}

fn read_file(path: Option<&Path>) -> Result<Sections, String> {
    let Some(path) = path else { return Ok(Sections::new()) };
    let shown = path.shown();
    let mut bytes = vec![];
    let file = std::fs::File::open(path);
    match file.and_then(|file| file.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes)) {
        Ok(_) if bytes.len() as u64 > MAX_FILE_BYTES => {
            Err(format!("{shown}: longer than {MAX_FILE_BYTES} bytes, no file of AWS profiles"))
        }
        Ok(_) => {
            let text = String::from_utf8_lossy(&bytes);
            parse(&text).map_err(|line| {
                format!("{shown}: line {line} is neither [profile] nor a setting, name = value")
            })
        }
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            Ok(Sections::new())
        }
        Err(error) => Err(format!("{shown}: cannot be read: {}", error.kind())),
    }
}

/// Parses a file, or returns the number of the first invalid line.
fn parse(text: &str) -> Result<Sections, usize> {
    let mut sections = Sections::new();
    let mut section: Option<&mut Settings> = None;
    // Last setting on the outer level, and its indentation.
    let mut outer = (String::new(), usize::MAX);
    for (at, line) in text.trim_start_matches('\u{feff}').lines().enumerate() {
        let trimmed = line.trim();
        if trimmed.is_empty() || trimmed.starts_with(['#', ';']) {
            continue;
        }
        let indent = line.len() - line.trim_start().len();
        if let Some(header) = trimmed.strip_prefix('[').filter(|_| indent == 0) {
            let (name, _) = header.split_once(']').ok_or(at + 1)?;
            section = Some(sections.entry(section_name(name)).or_default());
            outer = (String::new(), usize::MAX);
            continue;
        }
        let settings = section.as_deref_mut().ok_or(at + 1)?;
        let setting = trimmed.split_once(['=', ':']);
        let setting =
            setting.map(|(name, value)| (name.trim().to_lowercase(), strip_comment(value)));
        match setting {
            Some((name, value)) if indent > outer.1 => {
                settings.insert(format!("{}.{name}", outer.0), value);
            }
            Some((name, value)) => {
                settings.insert(name.clone(), value);
                outer = (name, indent);
            }
            // A continued value: no setting that we read has one.
            None if indent > outer.1 => {}
            None => return Err(at + 1),
        }
    }
    Ok(sections)
}

/// Returns the name of a section, with one blank between its words and without quotes.
fn section_name(header: &str) -> String {
    let words = header.trim().splitn(2, char::is_whitespace);
    let words = words.map(|word| word.trim().trim_matches(['"', '\'']));
    words.collect::<Vec<_>>().join(" ")
}

/// Returns a value without the comment after it.
fn strip_comment(value: &str) -> String {
    let marks = [" #", " ;", "\t#", "\t;"];
    let end = marks.iter().filter_map(|mark| value.find(mark)).min().unwrap_or(value.len());
    value[..end].trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn profile_from(
        config: &str,
        credentials: &str,
        profile: Option<&str>,
    ) -> Result<Profile, String> {
        let dir = tempfile::tempdir().unwrap();
        let aws = dir.path().join(".aws");
        std::fs::create_dir(&aws).unwrap();
        std::fs::write(aws.join("config"), config).unwrap();
        std::fs::write(aws.join("credentials"), credentials).unwrap();
        let mut environment = Environment::new();
        environment.insert("HOME".to_owned(), dir.path().display().to_string());
        if let Some(profile) = profile {
            environment.insert("AWS_PROFILE".to_owned(), profile.to_owned());
        }
        Profile::read(&environment)
    }

    const CONFIG: &str = "\u{feff}# of a user\r\n[default]\r\nregion = eu-west-1 # there\r\n\
        [profile \"my own\"]\n  Region: us-west-2\n  services=local\n  s3 =\n    max = 20\n  output = json\n\
        [services local]\ns3 =\n  endpoint_url = http://h:1\n[profile work]\nregion=x\n\
        aws_access_key_id=old\nendpoint_url = http://all\n";

    #[test]
    fn settings_are_found_like_aws_cli() {
        let keys = "[default]\naws_access_key_id = A\naws_secret_access_key = s/+=:#\n\
            [work]\naws_access_key_id = new\n";
        let profile = profile_from(CONFIG, keys, None).unwrap();
        assert_eq!(profile.get("region"), Some("eu-west-1"));
        assert_eq!(profile.get("aws_secret_access_key"), Some("s/+=:#"));
        let profile = profile_from(CONFIG, keys, Some("my own")).unwrap();
        assert_eq!(profile.get("region"), Some("us-west-2"));
        assert_eq!((profile.get("s3.max"), profile.get("output")), (Some("20"), Some("json")));
        let endpoints = (profile.endpoint("s3"), profile.endpoint("sts"));
        assert_eq!(endpoints, (Some("http://h:1"), None));
        let profile = profile_from(CONFIG, keys, Some("work")).unwrap();
        assert_eq!(profile.get("aws_access_key_id"), Some("new"));
        assert_eq!(profile.endpoint("s3"), Some("http://all"));
    }

    #[test]
    fn invalid_settings_are_named_in_error() {
        let errors = profile_from(CONFIG, "", Some("none")).unwrap_err();
        assert!(errors.contains("no profile 'none'") && errors.contains(".aws/config"), "{errors}");
        for (text, line) in [("a = b\n", 1), ("[default]\nx\n", 2), ("[default\n", 1), ("\0", 1)] {
            let errors = profile_from("", text, None).unwrap_err();
            assert!(errors.contains(&format!(".aws/credentials: line {line} is")), "{errors}");
        }
        let errors = profile_from(&"#\n".repeat(1 << 20), "", None).unwrap_err();
        assert!(errors.contains("config: longer than"), "{errors}");
        // Without files there are no settings.
        assert!(Profile::read(&Environment::new()).unwrap().get("region").is_none());
    }
}

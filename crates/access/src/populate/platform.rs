//! Platforms of container images: `linux/arm64`, `linux/arm/v7`.

use serde::Deserialize;

/// Operating system, architecture and variant.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
pub struct ImagePlatform {
    #[serde(default)]
    os: String,
    #[serde(default)]
    architecture: String,
    variant: Option<String>,
}

impl ImagePlatform {
    /// Returns the platform of this machine.
    pub fn host() -> Self {
        let (architecture, variant) = match std::env::consts::ARCH {
            "x86_64" => ("amd64", None),
            "aarch64" => ("arm64", None),
            "x86" => ("386", None),
            "powerpc64" if cfg!(target_endian = "little") => ("ppc64le", None),
            "loongarch64" => ("loong64", None),
            other => (other, None),
        };
        Self { os: "linux".into(), architecture: architecture.into(), variant }
    }

    /// Returns the operating system.
    pub fn os(&self) -> &str {
        &self.os
    }

    /// Returns the architecture.
    pub fn architecture(&self) -> &str {
        &self.architecture
    }

    /// Returns the variant of the architecture.
    pub fn variant(&self) -> Option<&str> {
        self.variant.as_deref()
    }

    /// Returns true if an image for `other` satisfies this request.
    pub fn is_compatible_with(&self, other: &Self) -> bool {
        let variant = self.variant.is_none() || self.variant == other.variant;
        self.os == other.os && self.architecture == other.architecture && variant
    }

    /// Returns true for entries that are not images, such as attestations.
    pub fn is_unknown(&self) -> bool {
        self.os == "unknown" || self.architecture == "unknown"
    }
}

impl std::str::FromStr for ImagePlatform {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut parts = text.split('/').map(str::to_owned);
        let platform = match (parts.next(), parts.next(), parts.next(), parts.next()) {
            (Some(os), Some(architecture), variant, None) => Self { os, architecture, variant },
            _ => return Err("OS/ARCHITECTURE is needed, such as linux/arm64"),
        };
        let empty = platform.os.is_empty() || platform.architecture.is_empty();
        if empty { Err("OS/ARCHITECTURE is needed, such as linux/arm64") } else { Ok(platform) }
    }
}

impl std::fmt::Display for ImagePlatform {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The texts may come from an image.
        let shown = |text: &str| crate::messages::escape_control_chars(text.as_bytes());
        write!(f, "{}/{}", shown(&self.os), shown(&self.architecture))?;
        match &self.variant {
            Some(variant) => write!(f, "/{}", shown(variant)),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn platforms_parse_and_match() {
        let platform = |text: &str| text.parse::<ImagePlatform>().unwrap();
        assert!(platform("linux/arm").is_compatible_with(&platform("linux/arm/v7")));
        assert!(!platform("linux/arm/v6").is_compatible_with(&platform("linux/arm/v7")));
        assert!(!platform("linux/amd64").is_compatible_with(&platform("linux/arm64")));
        assert!(platform("unknown/unknown").is_unknown());
        assert_eq!(platform("linux/arm/v7").to_string(), "linux/arm/v7");
        for bad in ["", "linux", "linux/", "/arm", "a/b/c/d"] {
            assert!(bad.parse::<ImagePlatform>().is_err());
        }
    }
}

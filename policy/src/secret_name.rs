//! Names of variables that hold a secret or point to one. Every name is given in ASCII upper case.
//!
//! The contract's four words match anywhere, so `KEYBOARD_LAYOUT` goes too: the deployment's `keep` list is for such names. `AUTH` is read as a word of
//! its own kind: it is a credential in `SSH_AUTH_SOCK`, `OAUTH2_PROXY` and `HTTP_AUTHORIZATION`, but not in `GIT_AUTHOR_NAME`.
use crate::environment::contains;

/// Anywhere in a name. The first four are the contract's plain pattern.
const WORDS: [&[u8]; 12] = [
    b"KEY",
    b"TOKEN",
    b"SECRET",
    b"PASSWORD",
    b"PASSPHRASE",
    b"PASSWD",
    b"PASSCODE",
    b"CREDENTIAL",
    b"ASKPASS",
    b"COOKIE",
    b"BEARER",
    b"NETRC",
];

/// At the end of a name. `PWD` and `OLDPWD` have no underscore and stay.
const SUFFIXES: [&[u8]; 6] = [b"_PASS", b"_PWD", b"_PAT", b"_JWT", b"_CREDS", b"_PASSFILE"];

/// At the start of a name: 1Password's and Bitwarden's unlocked sessions.
const PREFIXES: [&[u8]; 2] = [b"OP_SESSION_", b"BW_SESSION"];

/// Whole names that no pattern catches: agents, caches and files that hold credentials.
const NAMES: [&[u8]; 21] = [
    b"AWS_CONFIG_FILE",
    b"AZURE_CONFIG_DIR",
    b"BORG_PASSCOMMAND",
    b"CLOUDSDK_CONFIG",
    b"DOCKER_CERT_PATH",
    b"DOCKER_CONFIG",
    b"GPG_AGENT_INFO",
    b"JWT",
    b"KRB5CCNAME",
    b"KRB5_CLIENT_KTNAME",
    b"KRB5_KTNAME",
    b"KUBECONFIG",
    b"NPM_CONFIG_USERCONFIG",
    b"PASS",
    b"PGPASSFILE",
    b"PGSERVICEFILE",
    b"REGISTRY_CONFIG",
    b"SSHPASS",
    b"SSH_AGENT_PID",
    b"XAUTHORITY",
    b"YARN_RC_FILENAME",
];

/// Whether a variable of this name is removed whatever its value.
pub(crate) fn is_secret(upper: &[u8]) -> bool {
    NAMES.contains(&upper)
        || WORDS.iter().any(|word| contains(upper, word))
        || SUFFIXES.iter().any(|suffix| upper.ends_with(suffix))
        || PREFIXES.iter().any(|prefix| upper.starts_with(prefix))
        || has_auth(upper)
}

/// `AUTH`, but not as the start of *author*; *authorization* is one again.
fn has_auth(upper: &[u8]) -> bool {
    let starts = upper
        .windows(4)
        .enumerate()
        .filter(|(_, window)| *window == b"AUTH")
        .map(|(index, _)| index + 4);
    starts
        .map(|end| &upper[end..])
        .any(|rest| !rest.starts_with(b"OR") || [&b"ORIZ"[..], b"ORIS"].iter().any(|ending| rest.starts_with(ending)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_and_pointers_to_them_go() {
        for name in [
            "AWS_SECRET_ACCESS_KEY",
            "AWS_ACCESS_KEY_ID",
            "GITHUB_TOKEN",
            "PGPASSWORD",
            "GPG_PASSPHRASE",
            "MYSQL_PWD",
            "DB_PASS",
            "SSHPASS",
            "GITHUB_PAT",
            "GOOGLE_APPLICATION_CREDENTIALS",
            "SSH_AUTH_SOCK",
            "HTTP_AUTHORIZATION",
            "OAUTH_CLIENT",
            "NPM_CONFIG__AUTH",
            "XAUTHORITY",
            "KUBECONFIG",
            "NETRC",
            "SUDO_ASKPASS",
            "PGPASSFILE",
            "AWS_SHARED_CREDENTIALS_FILE",
            "OP_SESSION_ACME",
            "KEYBOARD_LAYOUT",
        ] {
            assert!(is_secret(name.as_bytes()), "{name}");
        }
    }

    #[test]
    fn what_tools_need_stays() {
        for name in [
            "PATH",
            "HOME",
            "LANG",
            "LC_ALL",
            "PWD",
            "OLDPWD",
            "USER",
            "SHELL",
            "GIT_AUTHOR_NAME",
            "GIT_AUTHOR_EMAIL",
            "GIT_AUTHOR_DATE",
            "AUTHOR",
            "LD_LIBRARY_PATH",
            "VIRTUAL_ENV",
            "COMPASS",
            "XDG_SESSION_ID",
            "GOPATH",
            "CARGO_HOME",
            "SSH_CONNECTION",
            "DISPLAY",
        ] {
            assert!(!is_secret(name.as_bytes()), "{name}");
        }
    }
}

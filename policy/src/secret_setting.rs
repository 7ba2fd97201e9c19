//! Passwords and tokens inside a longer value: `Password=…` in a connection string, `"token": "…"` in JSON, `--db-password=…` among options.

/// Anywhere in a setting's name, lower case.
const WORDS: [&str; 17] = [
    "password",
    "passwd",
    "passphrase",
    "secret",
    "apikey",
    "api_key",
    "api-key",
    "accountkey",
    "accesskey",
    "access_key",
    "access-key",
    "sharedaccess",
    "privatekey",
    "private_key",
    "credential",
    "signature",
    "authorization",
];

/// The whole name, or what follows its last `.`, `_` or `-`.
const LAST_WORDS: [&str; 4] = ["pwd", "pass", "token", "sig"];

/// Longest name of a setting that is looked at: bounds the work for each separator.
const LONGEST_NAME: usize = 64;

/// Whether the value has a setting that is called like a secret and is not empty.
pub(crate) fn has_password_setting(value: &[u8]) -> bool {
    value.iter().enumerate().any(|(index, byte)| match byte {
        b'=' | b':' => is_password_setting(&value[..index], *byte, &value[index + 1..]),
        _ => false,
    })
}

fn is_password_setting(before: &[u8], separator: u8, after: &[u8]) -> bool {
    let follows = |byte: &u8| matches!(byte, b' ' | b'"' | b'\'');
    if separator == b':' && !after.first().is_some_and(follows) && !before.last().is_some_and(follows) {
        return false; // a search path, a time: the common case, before any closer look
    }
    let before = before.trim_ascii_end();
    let unquoted = before.strip_suffix(b"\"").or_else(|| before.strip_suffix(b"'"));
    let unquoted = unquoted.map(|name| name.strip_suffix(b"\\").unwrap_or(name));
    // `a: b` and `"a":"b"` are settings, `a:b` is a list or a time.
    if separator == b':' && unquoted.is_none() && !after.first().is_some_and(follows) {
        return false;
    }
    let name = name_at_end(unquoted.unwrap_or(before));
    let Some(kind) = kind_of(&name, unquoted.is_some()) else {
        return false;
    };
    is_filled(setting_value(after), kind)
}

/// How sure a name is.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Password,
    /// A count of tokens is a number, a token is not.
    Token,
}

fn kind_of(name: &str, quoted: bool) -> Option<Kind> {
    let last = name.rsplit(['.', '_', '-']).next().unwrap_or_default();
    if last.ends_with("token") {
        return Some(Kind::Token);
    }
    let is_password = WORDS.iter().any(|word| name.contains(word))
        || LAST_WORDS.contains(&last)
        || name == "_auth"
        || (quoted && name == "auth");
    is_password.then_some(Kind::Password)
}

fn name_at_end(before: &[u8]) -> String {
    let length = before
        .iter()
        .rev()
        .take(LONGEST_NAME)
        .take_while(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.'))
        .count();
    String::from_utf8_lossy(&before[before.len() - length..]).to_ascii_lowercase()
}

fn setting_value(after: &[u8]) -> &[u8] {
    let value = after
        .get(..after.len().min(1024))
        .unwrap_or_default()
        .trim_ascii_start();
    let value = value.strip_prefix(b"\\").unwrap_or(value);
    let value = value
        .strip_prefix(b"\"")
        .or_else(|| value.strip_prefix(b"'"))
        .unwrap_or(value);
    let length = value
        .iter()
        .take_while(|byte| {
            !byte.is_ascii_whitespace() && !matches!(byte, b';' | b'&' | b',' | b'"' | b'\'' | b'}' | b'\\')
        })
        .count();
    &value[..length]
}

/// Not empty, not a reference to another variable, not a mask, not a switch.
fn is_filled(value: &[u8], kind: Kind) -> bool {
    let is_reference = matches!(value, [b'$', b'{' | b'(' | b'A'..=b'Z' | b'_', ..] | [b'<' | b'{', ..]);
    let is_mask = value.iter().all(|byte| *byte == b'*');
    let is_switch = [&b"true"[..], b"false", b"null", b"none", b"yes", b"no", b"on", b"off"]
        .iter()
        .any(|word| value.eq_ignore_ascii_case(word));
    let is_count = kind == Kind::Token && value.iter().all(u8::is_ascii_digit);
    !(is_reference || is_mask || is_switch || is_count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_of_every_notation_are_found() {
        for value in [
            "Pwd=x",
            "Uid=u;Pwd = x",
            "password: x",
            r#"{"user":"u","password":"x"}"#,
            r#"{\"password\":\"x\"}"#,
            r#"{"auths":{"h":{"auth":"dTpw"}}}"#,
            "--db-password=x",
            "-Djavax.net.ssl.trustStorePassword=changeit",
            "//registry/:_authToken=abc",
            "https://h/p?sv=1&sig=abc",
            "https://h/?access_token=abc",
            "host=h password=x dbname=d",
            "Authorization: token abc",
            "X-Api-Key: abc",
        ] {
            assert!(has_password_setting(value.as_bytes()), "{value}");
        }
    }

    #[test]
    fn empty_masked_referenced_and_unrelated_settings_are_not() {
        for value in [
            "password=",
            "Enter password: ",
            "password=***",
            "password=${PW}",
            "password=$PW",
            "Trusted=yes;Password=;",
            "--max-token=500",
            "max_tokens=abc",
            "secret: false",
            "bypass-all:x",
            "a=b;c=d",
            "12:30",
        ] {
            assert!(!has_password_setting(value.as_bytes()), "{value}");
        }
    }
}

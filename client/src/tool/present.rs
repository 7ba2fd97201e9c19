//! Cards for a user interface: pure functions of what a conversation has kept, so that an old one can be shown again.
use serde::Serialize;
use serde_json::Value;

use crate::tool::bash::BashValue;
use crate::tool::render::{ExitStatus, parse_exit_status};

/// What is shown.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "kind", rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum Card {
    /// A command.
    TerminalCall {
        /// The command.
        title: String,
        /// What it does.
        #[serde(skip_serializing_if = "Option::is_none")]
        description: Option<String>,
        /// Where, when the call says so.
        #[serde(skip_serializing_if = "Option::is_none")]
        cwd: Option<String>,
    },
    /// What came of a command.
    TerminalResult {
        /// The text without the marker of the exit.
        output: String,
        /// How it ended.
        exit: Exit,
    },
    /// Anything else.
    Generic {
        /// A heading.
        title: String,
        /// The text.
        body: String,
    },
}

/// How a command ended, as data.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Exit {
    /// By itself.
    Code(i32),
    /// By a signal.
    Signal(String),
}

impl From<ExitStatus> for Exit {
    fn from(status: ExitStatus) -> Self {
        match status {
            ExitStatus::Exited(code) => Self::Code(code),
            ExitStatus::Killed(name) => Self::Signal(name),
        }
    }
}

/// What is known of a result beside its text.
#[derive(Clone, Copy, Debug)]
pub enum AtHand<'a> {
    /// Nothing: the text has to tell.
    Nothing,
    /// Its value.
    Value(&'a BashValue),
    /// That it is an error.
    Error,
}

/// The card of a call.
///
/// ```
/// use dsh_client::tool::present::{Card, present_call};
/// use serde_json::json;
///
/// let card = present_call(&json!({"command": "make", "description": "Build", "workdir": "src"}));
/// assert_eq!(card, Card::TerminalCall { title: "make".into(), description: Some("Build".into()), cwd: Some("src".into()) });
/// ```
#[must_use]
pub fn present_call(arguments: &Value) -> Card {
    let (title, description) = (command(arguments), string(arguments, "description"));
    if is_background(arguments) {
        return Card::Generic {
            title,
            body: description.unwrap_or_default(),
        };
    }
    Card::TerminalCall {
        title,
        description,
        cwd: string(arguments, "workdir"),
    }
}

/// The card of a result.
#[must_use]
pub fn present_result(arguments: &Value, text: &str, at_hand: AtHand<'_>) -> Card {
    let result = match at_hand {
        AtHand::Value(BashValue::Foreground(result)) => Some(&**result),
        AtHand::Value(BashValue::Background { .. }) | AtHand::Error => return generic(arguments, text),
        AtHand::Nothing if is_background(arguments) || is_error(text) => return generic(arguments, text),
        AtHand::Nothing => None,
    };
    let parsed = parse_exit_status(text, result);
    Card::TerminalResult {
        output: parsed.body.to_owned(),
        exit: parsed.status.into(),
    }
}

/// One line that begins as an error does and no exit after it. A command that prints only that and succeeds cannot be told apart by its text.
fn is_error(text: &str) -> bool {
    text.starts_with("Error: ") && !text.contains('\n')
}

fn is_background(arguments: &Value) -> bool {
    arguments["run_in_background"] == Value::Bool(true)
}

fn generic(arguments: &Value, text: &str) -> Card {
    Card::Generic {
        title: command(arguments),
        body: text.to_owned(),
    }
}

fn command(arguments: &Value) -> String {
    string(arguments, "command").unwrap_or_default()
}

fn string(arguments: &Value, name: &str) -> Option<String> {
    arguments.get(name)?.as_str().map(str::to_owned)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use dsh_policy::codec::from_json;
    use serde_json::json;

    fn foreground(stdout: &str, code: i32) -> BashValue {
        let json = json!({
            "exitCode": code, "signal": null, "timedOut": false, "aborted": false, "timeoutMs": 1,
            "stdout": {"text": stdout, "truncated": false, "bytes": 0}, "stderr": {"text": "", "truncated": false, "bytes": 0},
            "sandbox": {"mode": "danger-full-access", "denied": false}, "environment": {"removed": []}, "survivors": 0,
            "usage": {"wallMs": 1, "userMs": 1, "systemMs": 1, "maxRssKib": 1}
        });
        BashValue::Foreground(from_json(json.to_string().as_bytes()).unwrap())
    }

    fn terminal(output: &str, exit: Exit) -> Card {
        Card::TerminalResult {
            output: output.into(),
            exit,
        }
    }

    fn shown(text: &str, at_hand: AtHand<'_>) -> Card {
        present_result(&json!({"command": "make"}), text, at_hand)
    }

    fn generic_card(text: &str) -> Card {
        Card::Generic {
            title: "make".into(),
            body: text.into(),
        }
    }

    #[test]
    fn the_exit_leaves_the_body_and_other_markers_stay() {
        for (text, card) in [
            ("a\n", terminal("a\n", Exit::Code(0))),
            ("(no output)", terminal("(no output)", Exit::Code(0))),
            ("a\n[exit code: 2]", terminal("a", Exit::Code(2))),
            (
                "a\n[killed by signal: SIGTERM]",
                terminal("a", Exit::Signal("SIGTERM".into())),
            ),
            (
                "a\n[sandbox: file access denied under read-only mode]\n[timed out after 5ms]\n[exit code: 1]",
                terminal(
                    "a\n[sandbox: file access denied under read-only mode]\n[timed out after 5ms]",
                    Exit::Code(1),
                ),
            ),
        ] {
            assert_eq!(shown(text, AtHand::Nothing), card);
        }
    }

    #[test]
    fn errors_and_background_starts_are_generic() {
        let error = "Error: tool call aborted";
        assert_eq!(shown(error, AtHand::Nothing), generic_card(error));
        assert_eq!(shown(error, AtHand::Error), generic_card(error));
        let started = "started background task bash-1";
        let value = BashValue::Background {
            task_id: "bash-1".into(),
        };
        assert_eq!(shown(started, AtHand::Value(&value)), generic_card(started));
        let arguments = json!({"command": "make", "description": "Build", "run_in_background": true});
        assert_eq!(
            present_result(&arguments, started, AtHand::Nothing),
            generic_card(started)
        );
        assert_eq!(present_call(&arguments), generic_card("Build"));
    }

    #[test]
    fn the_value_knows_better_than_the_text() {
        let value = foreground("[exit code: 3]", 0);
        assert_eq!(
            shown("[exit code: 3]", AtHand::Value(&value)),
            terminal("[exit code: 3]", Exit::Code(0))
        );
        assert_eq!(shown("[exit code: 3]", AtHand::Nothing), terminal("", Exit::Code(3)));
        let value = foreground("Error: printed", 0);
        assert_eq!(
            shown("Error: printed", AtHand::Value(&value)),
            terminal("Error: printed", Exit::Code(0))
        );
        assert_eq!(
            shown("Error: printed\n[exit code: 1]", AtHand::Nothing),
            terminal("Error: printed", Exit::Code(1))
        );
    }

    #[test]
    fn arguments_that_no_tool_would_take_can_be_shown() {
        for arguments in [json!(null), json!([]), json!({"command": 3})] {
            let empty = Card::TerminalCall {
                title: String::new(),
                description: None,
                cwd: None,
            };
            assert_eq!(present_call(&arguments), empty);
        }
        assert_eq!(
            serde_json::to_value(terminal("a", Exit::Code(2))).unwrap(),
            json!({"kind": "terminalResult", "output": "a", "exit": {"code": 2}})
        );
    }
}

//! The `bash` tool as an MCP server: whatever speaks the Model Context Protocol runs its commands here.
//!
//! Roots of the client become the workspace, a progress token hears of the output, a cancelled request ends its command, and a wider mode is asked of the user
//! through elicitation. Clients that cannot be asked (or speak a version that forbids it) get the error that says so.
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use dsh_policy::SandboxMode;
use rmcp::model::{
    BooleanSchema, CallToolRequestParams, CallToolResponse, CallToolResult, ContentBlock, ElicitRequestParams,
    ElicitationAction, ElicitationSchema, Implementation, ListToolsResult, PaginatedRequestParams,
    ProgressNotificationParam, ProgressToken, ServerCapabilities, ServerConfig, Tool,
};
use rmcp::service::{ElicitationMode, NotificationContext, RequestContext, ServiceError};
use rmcp::{ErrorData, Peer, RoleServer, ServerHandler, ServiceExt as _};
use serde_json::Value;
use tokio::sync::{Mutex, watch};

use crate::address::Endpoint;
use crate::connection::{Connection, Event};
use crate::error::ClientError;
use crate::tool::bash::{Answer, BashTool, Call, Composition};
use crate::tool::environment::{CallContext, EnvironmentRegistry};
use crate::tool::error::ToolError;
use crate::tool::escalate::{Approval, ApprovalRequest, Approver, PendingApproval};
use crate::tool::schema::{self, Offer};

const TOOL: &str = "bash";
const DESCRIPTION: &str = "Runs a shell command with `bash -c`, confined: writes outside of what the mode permits are refused, and each refusal is listed in the result as a fact.";
/// Between two notifications of progress.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);
/// A person who does not answer a question for so long is not there.
const ANSWER_DEADLINE: Duration = Duration::from_secs(600);

/// How commands are run.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Which daemon.
    pub endpoint: Endpoint,
    /// The mode of every call; none is the deployment's default.
    pub mode: Option<SandboxMode>,
    /// The workspace; none is the client's first root, else the current folder.
    pub workspace: Option<PathBuf>,
}

/// Serves the client at the other end of stdin and stdout until it leaves.
///
/// # Errors
/// [`ClientError::Protocol`] when the peer is no MCP client.
pub async fn serve(settings: Settings) -> Result<(), ClientError> {
    let server = Server {
        settings,
        root: Arc::default(),
        environment: EnvironmentRegistry::new(None),
    };
    let failed = |error: &dyn std::fmt::Display| ClientError::Local(format!("the MCP client broke off: {error}"));
    let running = server
        .serve(rmcp::transport::io::stdio())
        .await
        .map_err(|error| failed(&error))?;
    running.waiting().await.map_err(|error| failed(&error))?;
    Ok(())
}

struct Server {
    settings: Settings,
    /// The client's first root, once it was asked for.
    root: Arc<Mutex<Option<PathBuf>>>,
    environment: EnvironmentRegistry,
}

impl ServerHandler for Server {
    fn get_info(&self) -> ServerConfig {
        let mut info = ServerConfig::new(ServerCapabilities::builder().enable_tools().build());
        info.server_info = Implementation::new("dsh-exec", env!("CARGO_PKG_VERSION"));
        info.instructions = Some(schema::PROMPT.to_owned());
        info
    }

    async fn list_tools(
        &self,
        _: Option<PaginatedRequestParams>,
        context: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        let offer = Offer {
            background: false,
            escalation: can_ask(&context.peer),
        };
        let tool = Tool::new(TOOL, DESCRIPTION, object(schema::bash_arguments(offer)));
        Ok(ListToolsResult::with_all_items(vec![
            tool.with_raw_output_schema(Arc::new(object(schema::bash_value()))),
        ]))
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        if request.name != TOOL {
            let text = format!("there is no tool called {}; the only one is {TOOL}", request.name);
            return Err(ErrorData::invalid_params(text, None));
        }
        let arguments = request.arguments.map_or(Value::Null, Value::Object);
        let result = match self.run(&arguments, &context).await {
            Ok(answer) => {
                let mut result = CallToolResult::success(vec![ContentBlock::text(answer.text)]);
                result.structured_content = serde_json::to_value(&answer.value).ok();
                result
            }
            Err(error) => CallToolResult::error(vec![ContentBlock::text(error.text())]),
        };
        Ok(result.into())
    }

    async fn on_roots_list_changed(&self, _: NotificationContext<RoleServer>) {
        *self.root.lock().await = None;
    }
}

impl Server {
    async fn run(&self, arguments: &Value, context: &RequestContext<RoleServer>) -> Result<Answer, ToolError> {
        let call = Call {
            workspace: self.workspace(&context.peer).await?,
            mode: self.settings.mode,
            agent: Some("mcp".to_owned()),
            context: CallContext::default(),
        };
        let peer = context.peer.clone();
        let approver = can_ask(&peer).then(|| Arc::new(Elicitation(peer)) as Arc<dyn Approver>);
        let composition = Composition {
            environment: self.environment.clone(),
            approver: Some(approver.unwrap_or_else(|| Arc::new(NobodyThere))),
            record: Arc::new(|_| {}),
        };
        // A connection of its own for each call: the daemon may have left since the last one.
        let connection = Connection::open(self.settings.endpoint.clone()).await?;
        let tool = BashTool::new(connection, composition);
        let (bytes, seen) = watch::channel(0u64);
        let on_event = |event: &Event| {
            if let Event::Output { data, .. } = event {
                bytes.send_modify(|bytes| *bytes += data.0.len() as u64);
            }
        };
        let progress = async {
            if let Some(token) = context.meta.get_progress_token() {
                tell_progress(&context.peer, token, seen).await;
            }
            std::future::pending::<()>().await;
        };
        tokio::select! {
            answer = tool.call_until(&call, arguments, on_event, context.ct.cancelled()) => answer,
            () = progress => Err(ToolError::Aborted),
        }
    }

    /// The folder that calls work in.
    async fn workspace(&self, peer: &Peer<RoleServer>) -> Result<PathBuf, ToolError> {
        if let Some(workspace) = &self.settings.workspace {
            return Ok(workspace.clone());
        }
        let mut known = self.root.lock().await;
        if let Some(root) = &*known {
            return Ok(root.clone());
        }
        let root = match first_root(peer).await {
            Some(root) => root,
            None => std::env::current_dir().map_err(|error| {
                ClientError::Local(format!("the current directory is gone ({error}); name a --workspace"))
            })?,
        };
        Ok(known.insert(root).clone())
    }
}

/// The first root that is a folder of this machine. Roots are deprecated by the protocol's latest version, and what the clients of today have.
#[allow(deprecated)]
async fn first_root(peer: &Peer<RoleServer>) -> Option<PathBuf> {
    peer.peer_info()?.capabilities.roots.as_ref()?;
    let roots = peer.list_roots().await.ok()?.roots;
    let mut folders = roots
        .iter()
        .filter_map(|root| url::Url::parse(&root.uri).ok()?.to_file_path().ok());
    folders.next()
}

fn can_ask(peer: &Peer<RoleServer>) -> bool {
    peer.supported_elicitation_modes().contains(&ElicitationMode::Form)
}

async fn tell_progress(peer: &Peer<RoleServer>, token: ProgressToken, mut seen: watch::Receiver<u64>) {
    while seen.changed().await.is_ok() {
        let bytes = *seen.borrow_and_update();
        let mut progress = ProgressNotificationParam::new(token.clone(), bytes as f64);
        progress.message = Some(format!("{bytes} bytes of output"));
        if peer.notify_progress(progress).await.is_err() {
            return;
        }
        tokio::time::sleep(PROGRESS_INTERVAL).await;
    }
}

/// Asks the user through the client.
struct Elicitation(Peer<RoleServer>);

impl Approver for Elicitation {
    fn ask<'a>(&'a self, request: &'a ApprovalRequest) -> PendingApproval<'a> {
        Box::pin(async move {
            let question = format!("{}\n\n{}", request.reason, request.command);
            let allow =
                |schema: BooleanSchema| schema.description(format!("Run this one command in {} mode", request.target));
            let Ok(requested_schema) = ElicitationSchema::builder()
                .required_bool_property("allow", allow)
                .build()
            else {
                return Approval::Unavailable;
            };
            let params = ElicitRequestParams::FormElicitationParams {
                meta: None,
                message: question,
                requested_schema,
            };
            match self
                .0
                .create_elicitation_with_timeout(params, Some(ANSWER_DEADLINE))
                .await
            {
                Ok(answer) => match answer.action {
                    ElicitationAction::Accept => {
                        let allowed = answer
                            .content
                            .is_some_and(|content| content["allow"] == Value::Bool(true));
                        if allowed {
                            Approval::AllowedOnce
                        } else {
                            Approval::Rejected
                        }
                    }
                    ElicitationAction::Decline => Approval::Rejected,
                    ElicitationAction::Cancel => Approval::Cancelled,
                    // Of a version of the protocol that is not known here; never a yes.
                    _ => Approval::Unavailable,
                },
                Err(ServiceError::Cancelled { .. }) => Approval::Cancelled,
                Err(_) => Approval::Unavailable,
            }
        })
    }
}

/// For clients without elicitation: whoever asks hears that there is no channel.
struct NobodyThere;

impl Approver for NobodyThere {
    fn ask<'a>(&'a self, _: &'a ApprovalRequest) -> PendingApproval<'a> {
        Box::pin(std::future::ready(Approval::Unavailable))
    }
}

/// The schemas of this crate are objects.
fn object(schema: Value) -> rmcp::model::JsonObject {
    match schema {
        Value::Object(object) => object,
        _ => rmcp::model::JsonObject::new(),
    }
}

// The console's texts. Every key of `en` is in `zh` too (a test compares them).

export const words = {
  en: {
    skip: "Skip to content", language: "Language", theme: "Theme", auto: "as the system", light: "light", dark: "dark",
    live: "Live", plan: "Placement", tenants: "Tenants", play: "Playground",
    key: "API key", open: "Open", keynote: "Kept in this tab only, until it is closed.",
    badkey: "This server needs a key.", unreachable: "The server does not answer.",
    ready: "ready", starting: "starting", dead: "not running", draining: "shutting down",
    generation: "Generated tokens a second", prompt: "Prompt tokens a second", running: "Running",
    waiting: "Waiting", kv: "KV cache in use", hits: "Prefix cache hits", requests: "Requests a minute",
    utilization: "Device in use", preemptions: "Preemptions",
    latency: "Latency of the last minute", ttft: "Time to first token", itl: "Between two tokens",
    e2e: "Whole request", queue: "In the queue", mean: "mean", count: "count", none: "none yet",
    operators: "Where each operator runs", operator: "operator", group: "group", place: "runs on", reason: "reason",
    calls: "calls", bytes: "bytes copied", seconds: "seconds",
    nofallback: "Every operator runs on the device.", fallbacks: "operators run on the CPU instead of the device.",
    notenants: "No key of a tenant has been used, or this server has no tenants.",
    models: "Models", adapters: "Adapters", aliases: "Aliases", names: "names", nomodel: "No model is loaded.",
    queued: "Queue by priority", priority: "priority", urgent: "urgent", standard: "standard", low: "low",
    promoted: "waited too long",
    device: "device", context: "context", cache: "KV cache", version: "version", since: "since",
    tokens: "tokens", model: "Model", temperature: "Temperature", maxtokens: "Longest answer, tokens",
    system: "System message", message: "Message", send: "Send", stop: "Stop", clear: "New conversation",
    you: "You", answer: "Answer", pick: "Choose a token of an answer to see how likely it was and what else was.",
    chosen: "chosen", probability: "probability", failed: "The request failed:", stopped: "stopped",
    chart: "the last five minutes, now", least: "least", most: "most",
  },
  zh: {
    skip: "跳到正文", language: "语言", theme: "主题", auto: "跟随系统", light: "浅色", dark: "深色",
    live: "实时", plan: "放置计划", tenants: "租户", play: "试用",
    key: "API 密钥", open: "打开", keynote: "仅保存在本标签页中，关闭即清除。",
    badkey: "此服务器需要密钥。", unreachable: "服务器没有响应。",
    ready: "就绪", starting: "启动中", dead: "未运行", draining: "正在关闭",
    generation: "每秒生成 token", prompt: "每秒提示 token", running: "运行中",
    waiting: "排队中", kv: "KV 缓存占用", hits: "前缀缓存命中率", requests: "每分钟请求数",
    utilization: "设备利用率", preemptions: "抢占次数",
    latency: "最近一分钟的延迟", ttft: "首 token 时间", itl: "token 间隔",
    e2e: "整个请求", queue: "排队时间", mean: "均值", count: "次数", none: "暂无",
    operators: "各算子的运行位置", operator: "算子", group: "组", place: "运行于", reason: "原因",
    calls: "调用次数", bytes: "拷贝字节", seconds: "秒",
    nofallback: "所有算子都在设备上运行。", fallbacks: "个算子回退到 CPU 运行。",
    notenants: "还没有租户密钥被使用，或此服务器未配置租户。",
    models: "模型", adapters: "适配器", aliases: "别名", names: "名称", nomodel: "没有加载模型。",
    queued: "各优先级的排队数", priority: "优先级", urgent: "紧急", standard: "标准", low: "低",
    promoted: "等待过久",
    device: "设备", context: "上下文", cache: "KV 缓存", version: "版本", since: "启动于",
    tokens: "个 token", model: "模型", temperature: "温度", maxtokens: "回答最长 token 数",
    system: "系统消息", message: "消息", send: "发送", stop: "停止", clear: "新对话",
    you: "你", answer: "回答", pick: "选择回答中的一个 token，查看它的概率和其他候选。",
    chosen: "所选", probability: "概率", failed: "请求失败：", stopped: "已停止",
    chart: "最近五分钟，当前", least: "最小", most: "最大",
  },
};

let language = "en";

export function setLanguage(name) {
  language = name in words ? name : "en";
  document.documentElement.lang = language === "zh" ? "zh-CN" : "en";
  for (const element of document.querySelectorAll("[data-word]")) element.textContent = t(element.dataset.word);
}

export function t(key) {
  return words[language][key] ?? key;
}

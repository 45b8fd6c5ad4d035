// Workers of pages that are opened as files, where browsers start none: the script runs in a hidden frame, so that
// the search of the site works there.
class FrameWorker extends EventTarget {
  constructor(address) {
    super();
    this.frame = document.createElement("iframe");
    this.frame.hidden = true;
    document.body.append(this.frame);
    this.inside = this.frame.contentWindow;
    window.addEventListener("message", (event) => this.receive(event));
    this.inside.document.open();
    this.inside.document.write(
      `<body><script>postMessage = (data) => parent.postMessage(data, "*");</script>` +
      `<script src="${address}"></script></body>`
    );
    this.inside.document.close();
    this.isReady = new Promise((ready) => { this.inside.onload = ready; });
  }

  receive(event) {
    if (event.source !== this.inside) return;
    const message = new MessageEvent("message", { data: event.data });
    this.dispatchEvent(message);
    if (this.onmessage) this.onmessage(message);
  }

  async postMessage(data) {
    await this.isReady;
    this.inside.dispatchEvent(new MessageEvent("message", { data: structuredClone(data) }));
  }

  terminate() {
    this.frame.remove();
  }
}

if (location.protocol === "file:") window.Worker = FrameWorker;

/** What fails alone: its error stands in its place, and the rest of the page is whole. */
import { Component, type ComponentChildren } from "preact";

export class Contained extends Component<{ what: string; children: ComponentChildren }, { failure: string | null }> {
  override state = { failure: null as string | null };

  override componentDidCatch(error: unknown): void {
    console.error(error);
    this.setState({ failure: error instanceof Error ? error.message : String(error) });
  }

  override render(): ComponentChildren {
    if (this.state.failure === null) return this.props.children;
    return <div role="alert"><p class="notice">{this.props.what} could not be shown: {this.state.failure}</p><p class="note">The rest of the page and the files beside it are not affected.</p></div>;
  }
}
